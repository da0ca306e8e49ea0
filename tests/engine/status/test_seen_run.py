"""One real run of engine, tier and Redis, as its operators see it: the status page, in a browser,
too; and dashboards and rules, whose every query a real Prometheus answers.

It has something to show: a quality target, prefix memories, a tier that it spills to, restores and
refreshes from, and a Redis with its curve.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import matplotlib.image
import pytest
from calibration.redis_server import RedisServer, redis_server
from demo_server import GREEDY, DemoServer, demo_server
from deploy.monitoring_queries import RULES, panel_queries, rule_queries, rules, unknown
from engine.memory.memory_samples import Stored, make_memory
from engine_process import CLEAN_ENVIRONMENT, DEMO_MODEL, PATIENT
from live_server import free_port
from prometheus_client.parser import text_string_to_metric_families
from sglang.srt.observability import metrics_collector
from tierd.live_tier import LiveTier, live_tier
from waiting import SAFETY_S, wait_for

from kvtier.calibration.documents import load_curve
from kvtier.calibration.store.directory import open_store
from kvtier.config import load_settings
from kvtier.heads.model.loading import load_model
from kvtier.memory.recipe import Recipe
from kvtier_sglang.status.figures import FIGURES, Kind

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PROMETHEUS = shutil.which("prometheus")
# These panels have no data while all is well, as docs/monitoring.md says.
NEEDS_A_FAILURE = {
    "kvtier-tier: Failed calls per second": "a call that fails",
    "kvtier-redis: Turns without a curve": "a turn before there is a curve",
    "kvtier-memories: Answered from the exact prefix": "a request that a memory does not know",
}
# Counters that are not there before what they count; serving/test_shadow.py has the last ones.
BEGIN_WITH_A_FAILURE = (
    "kvtier_tier_errors_total", "sglang:num_retracted_requests_total", "kvtier_shadow_",
)  # fmt: skip
# Longer than any run, and not more steps of a second than Prometheus answers.
RUN_S = 10_000
RULE_ROUNDS = "prometheus_rule_group_iterations_total"
BACKGROUNDS = {"light": (255, 255, 255), "dark": (0x14, 0x18, 0x1E)}


ADMIN_KEY = "the-admins-own"
SESSIONS = 2
EXPORTER = shutil.which("prometheus-redis-exporter")
RESTORED_TOKENS = 1600 * SESSIONS

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass
class SeenRun:
    """The parts that run. prompts: what its sessions have said so far, with the answers."""

    server: DemoServer
    tier: LiveTier
    redis: RedisServer
    memory: Stored
    prompts: list[list[int]]
    redis_metrics_url: str | None
    # Before the last time that all sessions came back.
    restored_before: float = 0

    def tier_state(self) -> dict[str, Any]:
        return self.server.state()["tier"]

    def status(self) -> dict[str, Any]:
        """The status of the only replica."""
        return json.loads(self.server.get("/kvtier/status.json?sessions=200"))["replicas"][0]

    def ask(self, prompt: list[int]) -> list[int]:
        """The answer, streamed: only then does SGLang time what is between tokens."""
        body = {"input_ids": prompt, "sampling_params": {**GREEDY, "max_new_tokens": 8}}
        text = self.server.post("/generate", {**body, "stream": True})
        events = [line for line in text.splitlines() if line]
        assert events[-1] == "data: [DONE]"
        return json.loads(events[-2].removeprefix("data: "))["output_ids"]

    def say(self, tokens: int, seed: int) -> None:
        """Every session says something more, one after the other."""
        rng = random.Random(seed)
        for prompt in self.prompts:
            prompt += [rng.randrange(136, 384) for _ in range(tokens)]
            prompt += self.ask(prompt)

    def ask_memory(self, seed: int) -> None:
        """A request that the prefix memory answers."""
        rng = random.Random(seed)
        self.ask([*self.memory.prefix, *(rng.randrange(136, 384) for _ in range(40))])

    def settle(self) -> None:
        """Wait until nothing is on its way to the tier any more, and the status page says so,
        too."""
        wait_for(lambda: not self.tier_state()["pending"])
        restored = self.tier_state().get("restored_tokens", 0)

        def told() -> bool:
            found = self.status()["figures"]
            return (
                not found["kvtier_engine_tier_pending"][""]
                and found["kvtier_restored_tokens"][""] == restored
            )

        wait_for(told)

    def drive(self, watched: Callable[[], None]) -> None:
        """Two turns; and twice an empty cache, a turn that comes back, another, and a request of
        the memory. watched: returns once whoever looks at the run has looked again. All that counts
        does so before that and after it, and so has a rate."""
        self.say(1500, seed=1)
        self.say(300, seed=2)
        for seed in (3, 4):
            self.settle()
            self.server.flush()
            self.restored_before = self.tier_state().get("restored_tokens", 0)
            self.say(200, seed=seed)
            self.say(100, seed=10 + seed)
            self.ask_memory(seed=20 + seed)
            self.settle()
            watched()


def samples_of(text: str) -> Samples:
    """Return what a target exports, by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(url: str) -> Samples:
    with urlopen(url, timeout=SAFETY_S) as answer:
        return samples_of(answer.read().decode())


@contextmanager
def seen_run(folder: Path) -> Iterator[SeenRun]:
    """Started, and not driven yet."""
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        tier = stack.enter_context(live_tier(folder, "--memory", "256m", "--metrics-port", "0"))
        recipe = Recipe(0.3, 40, 0.5, 7, 0.0)
        memory = make_memory(load_model(str(DEMO_MODEL)), folder / "memories/m", 150, recipe, 2)
        with open_store(load_settings(redis_url=redis.url)) as store:
            store.put(load_curve(DEMO_MODEL / "curve.json"))
        environment = {**CLEAN_ENVIRONMENT, **PATIENT, "KVTIER_REDIS_URL": redis.url}
        command = [
            *("--max-total-tokens", "20000", "--chunked-prefill-size", "512"),
            *("--skip-tokenizer-init", "--sleep-on-idle", "--decode-log-interval", "1"),
            *("--calibration-poll-s", "0.5", "--quality", "0.9"),
            *("--head-profile", str(DEMO_MODEL / "head_profile.json")),
            *("--memory", str(memory.folder.parent), "--tier", tier.address),
            *("--refresh", "turn", "--no-tier-shared-memory"),
            *("--enable-metrics", "--admin-api-key", ADMIN_KEY),
        ]
        # Only what this process starts sees it: the servers of tests take the environment as it is.
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name in set(os.environ) - set(environment):
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        server = stack.enter_context(demo_server(folder, *command, key=ADMIN_KEY))
        exporter = None
        if EXPORTER is not None:
            exporter = stack.enter_context(redis_exporter(EXPORTER, redis, folder))
        prompts: list[list[int]] = [[] for _ in range(SESSIONS)]
        yield SeenRun(server, tier, redis, memory, prompts, exporter)


@contextmanager
def redis_exporter(binary: str, redis: RedisServer, folder: Path) -> Iterator[str]:
    address = f"127.0.0.1:{free_port()}"
    command = [binary, "-redis.addr", redis.url.replace("unix:", "unix:", 1)]
    command += ["-web.listen-address", address]
    with (folder / "exporter.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        url = f"http://{address}/metrics"
        wait_for(lambda: _answers(url))
        yield url
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=SAFETY_S) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def prometheus_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def run(tmp_path_factory, prometheus_port) -> Iterator[SeenRun]:
    folder = tmp_path_factory.mktemp("seen")
    with seen_run(folder) as started, scraping(started, folder, prometheus_port) as scraped:
        started.drive(scraped)
        yield started


@contextmanager
def scraping(run: SeenRun, folder: Path, port: int) -> Iterator[Callable[[], None]]:
    """A Prometheus with the rules that scrapes what runs, where there is one; yields what returns
    once every target was scraped, and the rules were evaluated, again."""
    if PROMETHEUS is None:
        yield lambda: None
        return
    targets = {"engine": f"{run.server.url}/metrics/", "tier": run.tier.metrics_url}
    if run.redis_metrics_url:
        targets["redis"] = run.redis_metrics_url
    jobs = [
        {
            "job_name": name,
            "metrics_path": "/" + url.split("/", 3)[3],
            "static_configs": [{"targets": [url.split("/")[2]]}],
        }
        for name, url in targets.items()
    ]
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    often = folder / "rules.yaml"
    often.write_text(RULES.read_text().replace("interval: 30s", "interval: 1s"))
    config = folder / "prometheus.yml"
    # JSON is YAML.
    config.write_text(
        json.dumps({"global": every, "scrape_configs": jobs, "rule_files": [str(often)]})
    )
    command = [
        *(PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(lambda: len(ask(port, "up == 1")) == len(targets))

        def seen() -> dict[str, float]:
            """Return how often each target was scraped, and the rules evaluated."""
            scrapes = ask(port, f"count_over_time(up[{RUN_S}s])")
            found = {one["metric"]["job"]: float(one["value"][1]) for one in scrapes}
            own = scrape(f"http://127.0.0.1:{port}/metrics")
            rounds = (n for (name, _), n in own.items() if name == RULE_ROUNDS)
            return found | {"rules": sum(rounds)}

        def again() -> None:
            before = seen()
            # A scrape or an evaluation that has begun may be too early.
            wait_for(lambda: all(seen()[name] >= n + 2 for name, n in before.items()))

        yield again
    finally:
        process.kill()
        process.wait()


def ask(port: int, query: str) -> list[dict]:
    """Return what Prometheus answers, or nothing while it starts."""
    url = f"http://127.0.0.1:{port}/api/v1/query?query={quote(query)}"
    try:
        with urlopen(url, timeout=SAFETY_S) as answer:
            return json.load(answer)["data"]["result"]
    except OSError:
        return []


# -- the status page --


def metrics(run: SeenRun) -> dict[tuple[str, str], float]:
    """kvtier's samples, by name and the value of the label beside the model's."""
    found = {}
    for (name, labels), value in scrape(f"{run.server.url}/metrics/").items():
        own = [text for key, text in labels if key != "model_name"]
        if name.startswith("kvtier_") and len(own) <= 1:
            found[name, "".join(own)] = value
    return found


def figures(run: SeenRun) -> dict[tuple[str, str], float]:
    """The status page's, by the names of their samples."""
    suffix = {one.name: "_total" if one.kind is Kind.COUNTER else "" for one in FIGURES}
    return {
        (name + suffix[name], label): value
        for name, values in run.status()["figures"].items()
        for label, value in values.items()
    }


class Texts(HTMLParser):
    """The text of every table cell, row by row."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._in_cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag == "tr":
            self.rows.append([])
        self._in_cell = tag == "td"
        if self._in_cell:
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data


def test_the_run_has_something_to_show(run):
    found = figures(run)
    assert found["kvtier_restored_tokens_total", ""] - run.restored_before > RESTORED_TOKENS
    assert found["kvtier_refreshes_total", "refreshed_turns"] > 0
    assert found["kvtier_compacted_tokens_total", ""] > 0
    assert found["kvtier_engine_tier_healthy", ""] == 1


def test_page_and_metrics_of_the_same_run_show_the_same_figures(run):
    ours = figures(run)
    wait_for(lambda: metrics(run) | ours == pytest.approx(metrics(run), abs=0.001))
    page = run.server.get("/kvtier/status?sessions=200")
    assert run.server.call("/kvtier/status", headers={})[0] == 401
    shown = {row[0]: row[1] for row in Texts(page).rows if len(row) == 2}
    told, compared = metrics(run), 0
    for name, text in shown.items():
        if not name.startswith("kvtier_"):
            continue
        key = re.fullmatch(r'(\w+)(?:\{\w+="(.*)"\})?', name).groups(default="")
        assert float(text.replace(",", "")) == pytest.approx(told[key], abs=0.001), name
        compared += 1
    assert compared >= len(ours)
    assert 'kvtier_turns_total{reason="quality"}' in shown


def test_rows_of_sessions_add_up_to_the_metrics(run):
    told, rows = metrics(run), run.status()["sessions"]["rows"]
    assert sum(row["bytes"] for row in rows) == told["kvtier_pool_used_bytes", ""]
    assert len(rows) == told["kvtier_idle_branches", ""]
    restored = sum(row["restored_tokens"] for row in rows)
    assert restored == told["kvtier_restored_tokens_total", ""] - run.restored_before
    long = [row for row in rows if row["context_tokens"] > 2000]
    assert len(long) == SESSIONS
    # Every session's exact KV is in the tier: all but the newest token of each, which has none yet.
    for row, prompt in zip(
        sorted(long, key=lambda row: row["idle_s"]), run.prompts[::-1], strict=True
    ):
        assert row["context_tokens"] == len(prompt) - 1
        assert row["tier_tokens"] == row["context_tokens"]
        assert {"quality", "as-recorded"} >= {turn["reason"] for turn in row["turns"]} - {None}
        assert row["bytes"] < 0.8 * row["full_bytes"]
    (behind,) = (row for row in rows if row["memory"] is not None)
    assert behind["memory"] == run.memory.memory.digest
    assert [turn["is_memory"] for turn in behind["turns"]] == [False, True]
    assert behind["num_turns"] == 1


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH (Debian: chromium)")
@pytest.mark.parametrize("scheme", BACKGROUNDS)
def test_a_browser_draws_the_page_light_and_dark_from_itself_alone(run, tmp_path, scheme):
    page = run.server.get("/kvtier/status")
    source, picture = tmp_path / "status.html", tmp_path / f"status-{scheme}.png"
    # The header says the same, which a file has none of.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    source.write_text(page.replace("<head>", f"<head>{meta}"))
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,1800"),
        *(["--force-dark-mode"] if scheme == "dark" else []),
        *(f"--screenshot={picture}", source.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SAFETY_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr
    pixels = (255 * matplotlib.image.imread(picture)).round().astype(int)[..., :3]
    assert tuple(pixels[2, 2]) == BACKGROUNDS[scheme]
    # Something is drawn: text and bars, and in more than one colour.
    other = (abs(pixels - pixels[2, 2]).sum(-1) > 60).mean()
    assert 0.01 < other < 0.6
    coloured = (pixels.max(-1) - pixels.min(-1) > 80).mean()
    assert coloured > 0.001


# -- dashboards and rules --


def scraped(run: SeenRun) -> dict[str, set[str]]:
    """Labels of what engine, tier and, where it has an exporter, Redis export, by name."""
    urls = [f"{run.server.url}/metrics/", run.tier.metrics_url]
    found: dict[str, set[str]] = {}
    for url in [*urls, *([run.redis_metrics_url] if run.redis_metrics_url else [])]:
        for name, labels in scrape(url):
            found.setdefault(name, set()).update(key for key, _ in labels)
    return found


def test_every_metric_of_dashboards_and_rules_is_exported_by_a_run(run):
    wrong = unknown([*panel_queries(), *rule_queries()], scraped(run))
    if run.redis_metrics_url is None:
        wrong = [one for one in wrong if "no target has redis_" not in one]
    wrong = [one for one in wrong if not any(name in one for name in BEGIN_WITH_A_FAILURE)]
    assert wrong == []
    # Only SGLang's source says that this one exists.
    assert '"sglang:num_retracted_requests_total"' in Path(metrics_collector.__file__).read_text()


def test_a_failed_call_has_the_metric_that_dashboards_ask_for(run):
    from tierd.live_tier import raw_stub

    from kvtier.v1 import tier_pb2 as pb

    with raw_stub(run.tier.address) as stub, pytest.raises(Exception, match="INVALID_ARGUMENT"):
        stub.Exists(pb.ExistsRequest(keys=[b"short"]))
    assert {"method", "code"} <= scraped(run)["kvtier_tier_errors_total"]


@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on PATH (Debian: prometheus)")
def test_prometheus_has_data_for_every_panel(run, prometheus_port):
    wanted = set(NEEDS_A_FAILURE)
    if run.redis_metrics_url is None:
        wanted |= {q.where for q in panel_queries() if "redis_" in q.expr}

    queries = [one for one in panel_queries() if one.where not in wanted]
    assert [one.where for one in queries if not ever(prometheus_port, one.expr)] == []


@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on PATH (Debian: prometheus)")
def test_prometheus_records_every_rule_and_no_alert_fires(run, prometheus_port):
    names = [rule["record"] for rule in rules() if "record" in rule]

    assert [name for name in names if not ever(prometheus_port, name)] == []
    assert ask(prometheus_port, 'ALERTS{alertstate="firing"}') == []


def ever(port: int, query: str) -> bool:
    """Return whether it has had a number for an answer at any time of the run: what it says of the
    last minutes is gone later."""
    _, now = ask(port, "time()")
    end = float(now)
    given = f"query={quote(query)}&start={end - RUN_S}&end={end}&step=1"
    with urlopen(f"http://127.0.0.1:{port}/api/v1/query_range?{given}", timeout=SAFETY_S) as answer:
        found = json.load(answer)["data"]["result"]
    values = (float(value) for one in found for _, value in one["values"])
    return any(value == value for value in values)

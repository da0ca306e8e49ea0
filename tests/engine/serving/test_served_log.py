"""A served run, and what is told of its prompts: in OpenAI's usage, on `/metrics`, on the status
page, and by its log, which the planner reads."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from engine_process import DEMO_MODEL
from live_server import free_port, serving
from prometheus_client.parser import text_string_to_metric_families
from waiting import SAFETY_S, wait_for

from kvtier import cli
from kvtier.traffic.formats import read_trace
from kvtier.traffic.prefixes import traffic_of
from kvtier.traffic.request_log import Logged, read_log

pytestmark = pytest.mark.engine

rng = random.Random(7)
CONTEXT = [rng.randrange(136, 384) for _ in range(1500)]
OTHERS = [[rng.randrange(136, 384) for _ in range(1500)] for _ in range(4)]


class Server:
    """url: of what serves; answers: usage and tokens of all that was asked, in this order."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.usages: list[dict[str, Any]] = []

    def post(self, path: str, body: dict[str, Any]) -> Any:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urlopen(Request(self.url + path, data, headers), timeout=SAFETY_S) as answer:
            return answer.read().decode()

    def get(self, path: str) -> str:
        with urlopen(self.url + path, timeout=SAFETY_S) as answer:
            return answer.read().decode()

    def ask(self, prompt: list[int], **more: Any) -> None:
        body = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
        self.usages.append(json.loads(self.post("/v1/completions", body))["usage"])

    def flush(self) -> None:
        """SGLang refuses while a request is being put away."""

        def flushed() -> bool:
            try:
                self.post("/flush_cache", {})
            except HTTPError:
                return False
            return True

        wait_for(flushed)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[list[dict[str, Any]], list[Logged], Path, str, dict]:
    """The usages, the lines of the log and where it is, `/metrics` and the status page's sessions
    of a run."""
    folder, port = tmp_path_factory.mktemp("served"), free_port()
    log = folder / "requests.jsonl"
    command = [
        *(sys.executable, "-m", "kvtier", "serve", "--model-path", str(DEMO_MODEL)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-total-tokens", "4096", "--chunked-prefill-size", "512"),
        *("--data-dir", str(folder), "--retention", "0.5", "--head-budgets", "equal"),
        *("--request-log", str(log), "--enable-cache-report", "--enable-metrics"),
        # Its own request would be the log's first.
        "--skip-server-warmup",
    ]
    with serving(command, port, log=folder / "server.log") as url:
        server = Server(url)
        server.ask(CONTEXT)
        server.ask([*CONTEXT, *OTHERS[0][:100]], session_id="the client's own")
        server.ask([*OTHERS[1][:40], *CONTEXT[20:]])
        for other in OTHERS:
            server.ask(other)
        server.ask([*CONTEXT, *OTHERS[0][:100]], session_id="the client's own")
        server.flush()
        server.ask(OTHERS[3])
        # A health check has no line.
        server.get("/health_generate")
        wait_for(lambda: log.is_file() and len(log.read_text().splitlines()) == 9)
        told = list(read_log(log))

        def published() -> str | None:
            text = server.get("/metrics/")
            return text if samples(text).get("kvtier_hit_tokens_total") == hits(told) else None

        wait_for(lambda: published() is not None)
        metrics = server.get("/metrics/")
        (replica,) = json.loads(server.get("/kvtier/status.json"))["replicas"]
        page = server.get("/kvtier/status")
    assert "1,499 flushed" in page
    return server.usages, told, log, metrics, replica


def hits(told: list[Logged]) -> int:
    return sum(one.hit for one in told)


def samples(text: str) -> dict[str, float]:
    """kvtier's, by name and reason."""
    return {
        sample.name + sample.labels.get("reason", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_cached_tokens_of_openais_usage_are_what_was_hit_or_restored(run):
    usages, told, *_ = run
    assert [one["prompt_tokens"] for one in usages] == [one.tokens for one in told]
    cached = [(one["prompt_tokens_details"] or {}).get("cached_tokens", 0) for one in usages]
    assert cached == [one.hit + one.restored for one in told]


def test_every_prompt_says_why_it_was_computed(run):
    _, told, *_ = run
    assert [one.hit + one.computed for one in told] == [one.tokens for one in told]
    first, second, edited, *_, again, flushed = told
    assert (first.hit, first.recomputed) == (0, {})
    assert (second.hit, second.recomputed) == (1500, {})
    assert set(edited.recomputed) == {"edited"}
    assert edited.recomputed["edited"] >= 1400
    assert edited.changed_at == 0
    assert set(again.recomputed) <= {"evicted", "cut", "edited"}
    assert again.recomputed["evicted"] >= 1400
    assert flushed.recomputed == {"flushed": 1499}
    assert second.session == again.session
    assert len({one.session for one in told}) > 4


def test_metrics_sum_up_to_the_lines(run):
    _, told, _, metrics, _ = run
    found = samples(metrics)
    for reason in ("evicted", "edited", "flushed", "weights", "lost"):
        tokens = sum(one.recomputed.get(reason, 0) for one in told)
        assert found[f"kvtier_recomputed_tokens_total{reason}"] == tokens
    new = sum(one.computed - one.recomputed_tokens for one in told)
    assert found["kvtier_new_tokens_total"] == new


def test_the_status_page_has_the_last_prompt_of_each_session(run):
    *_, replica = run
    last = [row["last_prompt"] for row in replica["sessions"]["rows"]]
    # The other is the health check's.
    (told,) = [prompt for prompt in last if prompt is not None]
    assert told == {
        "tokens": 1500, "hit": 0, "restored": 0, "computed": 1500,
        "recomputed": {"flushed": 1499},
    }  # fmt: skip


def test_the_planner_reads_the_log(run):
    _, told, log, *_ = run
    trace = read_trace(log)
    assert [one.input_tokens for one in trace.requests] == [one.tokens for one in told]
    traffic = traffic_of(trace)
    assert traffic.num_sessions == len({one.session for one in told})
    # The second request's first two blocks are the first one's.
    first, second = (one.block_ids for one in trace.requests[:2])
    assert first[:2] == second[:2]
    assert first[2] != second[2]


def test_the_log_is_explained(run, capsys):
    _, told, log, *_ = run
    assert cli.main(["trace", "explain", str(log), "--json"]) == 0
    every = json.loads(capsys.readouterr().out)["all"]
    assert every["tokens"] == every["hit"] + every["new"] + sum(every["recomputed"].values())
    assert every["tokens"] == sum(one.tokens for one in told)

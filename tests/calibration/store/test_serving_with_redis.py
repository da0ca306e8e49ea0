"""Two live servers and one `kvtier calibrate` share a real Redis that is killed under load."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from calibration_samples import curve_document
from live_server import free_port, serving
from prometheus_client.parser import text_string_to_metric_families
from redis_server import RedisServer, redis_server
from test_redis_tls import PASSWORD, tls_binary, tls_server
from waiting import SAFETY_S, wait_for

from kvtier.calibration.documents import CurveDocument
from kvtier.calibration.store.opening import open_store
from kvtier.calibration.store.redis import RedisStore
from kvtier.config import load_settings

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "kvtier-demo"
PROFILE = MODEL / "head_profile.json"
PAUSE_S = 0.2
PROMPT_TOKENS, SINK, RECENT = 600, 16, 32
QUALITY = 0.9

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@contextmanager
def persistent_redis(folder: Path, *, tls: bool) -> Iterator[tuple[RedisServer, dict[str, str]]]:
    """A Redis that keeps its data when it is killed, and the settings that reach it."""
    durable = ("--appendonly", "yes", "--appendfsync", "always")
    if not tls:
        with redis_server(*durable) as server:
            yield server, {"KVTIER_REDIS_URL": server.url}
        return
    # The user is on the command line, because a killed server forgets users that were added later.
    user = ("--user", "ada", "on", f">{PASSWORD}", "~*", "+@all")
    with tls_server(folder, "no", *durable, *user) as (server, port):
        url = f"rediss://ada:{PASSWORD}@127.0.0.1:{port}/0"
        yield server, {"KVTIER_REDIS_URL": url, "KVTIER_REDIS_CA": str(folder / "ca.pem")}


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SAFETY_S) as answer:
        return json.loads(answer.read())


def retention(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/server_info", timeout=SAFETY_S) as answer:
        return json.loads(answer.read())["internal_states"][0]["kvtier"]["retention"]


class Load:
    """Requests over fresh contexts, one after another, to one server until stopped."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.rng = url, random.Random(seed)
        self.done, self.failures = 0, []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ask(self) -> None:
        prompt = [self.rng.randrange(136, 384) for _ in range(PROMPT_TOKENS)]
        params = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
        answer = post(f"{self.url}/generate", {"input_ids": prompt, "sampling_params": params})
        assert answer["meta_info"]["completion_tokens"] == 2
        self.done += 1

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.ask()
            except Exception as error:
                self.failures.append(repr(error))
            self._stopping.wait(PAUSE_S)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(SAFETY_S)


def test_a_killed_redis_costs_no_request_and_the_curve_comes_back(tmp_path, monkeypatch):
    # The store is reached by TLS where there is a redis-server that has it; nothing else differs.
    tls = tls_binary() is not None or os.environ.get("KVTIER_REQUIRE_TLS_REDIS") == "1"
    folder = tmp_path / "c"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        redis, reach = stack.enter_context(persistent_redis(folder, tls=tls))
        environment = {
            **reach,
            "KVTIER_HEAD_PROFILE": str(PROFILE),
            "KVTIER_LOCALITY_SINK_TOKENS": str(SINK),
            "KVTIER_LOCALITY_RECENT_TOKENS": str(RECENT),
            "KVTIER_LOCALITY_BRANCH_RECENT_TOKENS": "16",
            "KVTIER_QUALITY": str(QUALITY),
            "KVTIER_CALIBRATION_POLL_S": "0.2",
            "KVTIER_DATA_DIR": str(tmp_path / "data"),
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        urls = [stack.enter_context(a_server(tmp_path / f"{name}.log")) for name in "ab"]
        loads = [Load(url, seed) for seed, url in enumerate(urls)]
        stack.callback(lambda: [load.stop() for load in loads])

        wait_for(lambda: all("no-curve" in reasons(url) for url in urls), "a turn without a curve")
        calibrate(tmp_path / "out")
        wait_for(lambda: all("quality" in reasons(url) for url in urls), "the curve in both")

        redis.process.kill()
        redis.process.wait()
        wait_for(lambda: all(counts(url)["unavailable"] > 0 for url in urls), "the outage noticed")
        before = [load.done for load in loads]
        wait_for(lambda: all(x.done > n for x, n in zip(loads, before, strict=True)), "serving on")
        assert all(newest(url)["reason"] == "quality" for url in urls), "by the last known curve"

        redis.socket.unlink(missing_ok=True)
        redis.start()
        changed = change_curve()
        wait_for(
            lambda: all(
                abs(newest(url)["retention"] - share_kept(changed, newest(url)["nll"])) < 0.01
                for url in urls
            ),
            "a changed curve in both servers without a restart",
        )
        for load in loads:
            load.stop()
        scraped = [metrics(url) for url in urls]
    assert [load.failures for load in loads] == [[], []]
    assert all(load.done >= 10 for load in loads)
    logs = (tmp_path / "a.log").read_text() + (tmp_path / "b.log").read_text()
    assert PASSWORD not in logs
    for url_metrics in scraped:
        assert url_metrics['turns_total{reason="quality"}'] >= 5
        assert url_metrics['turns_total{reason="no-curve"}'] >= 1
        assert url_metrics['calibration_events_total{event="unavailable"}'] >= 1
        assert url_metrics["quality_target"] == QUALITY
        turns = sum(v for k, v in url_metrics.items() if k.startswith("turns_total"))
        assert url_metrics["retained_share_count"] == turns
        assert 0 < url_metrics["retained_tokens_total"] < url_metrics["prompt_tokens_total"]
        # A prompt that begins as another did adds a little less.
        assert url_metrics["prompt_tokens_total"] == pytest.approx(turns * PROMPT_TOKENS, rel=0.02)
        assert url_metrics["predicted_quality_count"] >= 5


def a_server(log: Path):
    port = free_port()
    command = [
        *(sys.executable, "-m", "kvtier", "serve", "--model-path", str(MODEL)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        # Idle servers poll; three processes share the cores of a small machine here.
        *("--max-total-tokens", "8192", "--sleep-on-idle", "--enable-metrics"),
    ]
    return serving(command, port, log=log, cwd=ROOT)


def calibrate(out: Path) -> None:
    """A real calibration, small: one curve over short contexts."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvtier", "calibrate", "curve", "--model-path", str(MODEL)),
            *("--len", "1k", "--contexts", "4", "--out", str(out)),
        ],
        capture_output=True,
        text=True,
        timeout=SAFETY_S,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "stored: kvtier:v1:curve:kvtier-demo:" in done.stdout


def change_curve() -> CurveDocument:
    """Put another curve where the calibrated one is."""
    with open_store(load_settings()) as store:
        assert isinstance(store, RedisStore)
        (stored,) = store.list()
        document = store.get(stored.key)
        assert isinstance(document, CurveDocument)
        same = {"model", "revision", "policy", "dtype", "nll_min", "nll_max", "retentions"}
        kept = document.model_dump(include=same)
        changed = curve_document(**kept, alpha=0.0, beta=0.3, power=1.0)
        store.put(changed)
    return changed


def reasons(url: str) -> dict[str, int]:
    return retention(url)["reasons"]


def counts(url: str) -> dict[str, int]:
    return retention(url)["calibration"]


def share_kept(curve: CurveDocument, nll: float) -> float:
    """Return the share of a prompt of the load that its CA heads keep under a curve."""
    protected = SINK + RECENT
    droppable = PROMPT_TOKENS - protected
    return (protected + curve.retention(QUALITY, nll) * droppable) / PROMPT_TOKENS


def metrics(url: str) -> dict[str, float]:
    """kvtier's Prometheus samples by name and labels, `kvtier_` and the model's name left out."""
    with urllib.request.urlopen(f"{url}/metrics/", timeout=SAFETY_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        if sample.name.startswith("kvtier_") and "le" not in sample.labels:
            assert sample.labels.pop("model_name") == str(MODEL)
            labels = "".join(f'{{{name}="{value}"}}' for name, value in sample.labels.items())
            found[sample.name.removeprefix("kvtier_") + labels] = sample.value
    return found


def newest(url: str) -> dict[str, Any]:
    return retention(url)["recent"][-1]

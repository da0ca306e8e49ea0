"""A live server and `kvtier calibrate` share a real Redis that is killed under load."""

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
from tls_redis import needs_tls_binary, tls_binary, write_certificates
from waiting import SAFETY_S, wait_for

from kvtier.calibration.documents import CurveDocument
from kvtier.calibration.store.directory import open_store
from kvtier.calibration.store.redis import RedisStore
from kvtier.config import load_settings

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "kvtier-demo"
PAUSE_S = 0.2
PROMPT_TOKENS, SINK, RECENT = 600, 16, 32
QUALITY = 0.9
PASSWORD = "s3cr3t"

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@contextmanager
def persistent_redis(folder: Path) -> Iterator[tuple[RedisServer, dict[str, str]]]:
    """A Redis that keeps its data when it is killed, and the settings that reach it: by TLS where
    there is a redis-server that has it; nothing else differs."""
    durable = ("--appendonly", "yes", "--appendfsync", "always")
    if tls_binary() is None and os.environ.get("KVTIER_REQUIRE_TLS_REDIS") != "1":
        with redis_server(*durable) as server:
            yield server, {"KVTIER_REDIS_URL": server.url}
        return
    write_certificates(folder)
    port = free_port()
    options = [
        *("--tls-port", str(port), "--bind", "127.0.0.1", "--tls-auth-clients", "no"),
        *("--tls-cert-file", str(folder / "server.pem")),
        *("--tls-key-file", str(folder / "server.key")),
        *("--tls-ca-cert-file", str(folder / "ca.pem")),
        # On the command line, because a killed server forgets users that were added later.
        *("--user", "ada", "on", f">{PASSWORD}", "~*", "+@all"),
    ]
    with redis_server(*durable, *options, binary=needs_tls_binary()) as server:
        url = f"rediss://ada:{PASSWORD}@127.0.0.1:{port}/0"
        yield server, {"KVTIER_REDIS_URL": url, "KVTIER_REDIS_CA": str(folder / "ca.pem")}


def asked(url: str, body: dict[str, Any] | None = None) -> bytes:
    """Return what a server answers: to a request with a body, or to one for a page."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SAFETY_S) as answer:
        return answer.read()


def status(url: str) -> dict[str, Any]:
    internal = json.loads(asked(f"{url}/server_info"))["internal_states"]
    return internal[0]["kvtier"]["retention"]


def newest(url: str) -> dict[str, Any]:
    return status(url)["recent"][-1]


class Load:
    """Requests over fresh contexts, one after another, until stopped."""

    def __init__(self, url: str) -> None:
        self.url, self.rng = url, random.Random(0)
        self.done, self.failures = 0, []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        params = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
        while not self._stopping.is_set():
            prompt = [self.rng.randrange(136, 384) for _ in range(PROMPT_TOKENS)]
            try:
                body = {"input_ids": prompt, "sampling_params": params}
                answer = json.loads(asked(f"{self.url}/generate", body))
                assert answer["meta_info"]["completion_tokens"] == 2
                self.done += 1
            except Exception as error:
                self.failures.append(repr(error))
            self._stopping.wait(PAUSE_S)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(SAFETY_S)


def test_a_killed_redis_costs_no_request_and_the_curve_comes_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        redis, reach = stack.enter_context(persistent_redis(tmp_path / "c"))
        environment = {
            **reach,
            "KVTIER_HEAD_PROFILE": str(MODEL / "head_profile.json"),
            "KVTIER_LOCALITY_SINK_TOKENS": str(SINK),
            "KVTIER_LOCALITY_RECENT_TOKENS": str(RECENT),
            "KVTIER_LOCALITY_BRANCH_RECENT_TOKENS": "16",
            "KVTIER_QUALITY": str(QUALITY),
            "KVTIER_CALIBRATION_POLL_S": "0.2",
            "KVTIER_DATA_DIR": str(tmp_path / "data"),
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        url = stack.enter_context(a_server(tmp_path / "log"))
        load = Load(url)
        stack.callback(load.stop)

        wait_for(lambda: "no-curve" in status(url)["reasons"], "a turn without a curve")
        calibrate(tmp_path / "out")
        wait_for(lambda: "quality" in status(url)["reasons"], "the curve")

        redis.process.kill()
        redis.process.wait()
        wait_for(lambda: status(url)["calibration"]["unavailable"] > 0, "the outage noticed")
        before = load.done
        wait_for(lambda: load.done > before, "serving on")
        assert newest(url)["reason"] == "quality", "by the last known curve"

        redis.socket.unlink(missing_ok=True)
        redis.start()
        changed = change_curve()

        def goes_by_it() -> bool:
            turn = newest(url)
            return abs(turn["retention"] - share_kept(changed, turn["nll"])) < 0.01

        wait_for(goes_by_it, "a changed curve without a restart")
        load.stop()
        found = metrics(url)
    assert load.failures == []
    assert load.done >= 10
    assert PASSWORD not in (tmp_path / "log").read_text()
    assert found['turns_total{reason="quality"}'] >= 5
    assert found['turns_total{reason="no-curve"}'] >= 1
    assert found['calibration_events_total{event="unavailable"}'] >= 1
    assert found["quality_target"] == QUALITY
    turns = sum(v for k, v in found.items() if k.startswith("turns_total"))
    assert found["retained_share_count"] == turns
    assert 0 < found["retained_tokens_total"] < found["prompt_tokens_total"]
    # A prompt that begins as another did adds a little less.
    assert found["prompt_tokens_total"] == pytest.approx(turns * PROMPT_TOKENS, rel=0.02)
    assert found["predicted_quality_count"] >= 5


def a_server(log: Path):
    port = free_port()
    command = [
        *(sys.executable, "-m", "kvtier", "serve", "--model-path", str(MODEL)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        # Idle servers poll; several processes share the cores of a small machine here.
        *("--max-total-tokens", "8192", "--sleep-on-idle", "--enable-metrics"),
    ]
    return serving(command, port, log=log, cwd=ROOT)


def calibrate(out: Path) -> None:
    """A real calibration, small: one curve over short contexts."""
    command = [
        *(sys.executable, "-m", "kvtier", "calibrate", "curve", "--model-path", str(MODEL)),
        *("--len", "1k", "--contexts", "4", "--out", str(out)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SAFETY_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "stored: kvtier:v1:curve:kvtier-demo:" in done.stdout


def change_curve() -> CurveDocument:
    """Put another curve where the calibrated one is."""
    with open_store(load_settings()) as store:
        assert isinstance(store, RedisStore)
        (stored,) = store.list()
        same = {"model", "revision", "policy", "dtype", "nll_min", "nll_max", "retentions"}
        kept = store.get(stored.key).model_dump(include=same)
        changed = curve_document(**kept, alpha=0.0, beta=0.3, power=1.0)
        store.put(changed)
    return changed


def share_kept(curve: CurveDocument, nll: float) -> float:
    """Return the share of a prompt of the load that its CA heads keep under a curve."""
    protected = SINK + RECENT
    droppable = PROMPT_TOKENS - protected
    return (protected + curve.retention(QUALITY, nll) * droppable) / PROMPT_TOKENS


def metrics(url: str) -> dict[str, float]:
    """kvtier's Prometheus samples by name and labels, `kvtier_` and the model's name left out."""
    found = {}
    for family in text_string_to_metric_families(asked(f"{url}/metrics/").decode()):
        for sample in family.samples:
            if sample.name.startswith("kvtier_") and "le" not in sample.labels:
                assert sample.labels.pop("model_name") == str(MODEL)
                labels = "".join(f'{{{name}="{value}"}}' for name, value in sample.labels.items())
                found[sample.name.removeprefix("kvtier_") + labels] = sample.value
    return found

"""A live server and `kvtier calibrate` share a real Redis that is killed under load."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from calibration_samples import curve_document
from demo_server import DEMO_MODEL, DemoServer, demo_server
from live_server import free_port
from redis_server import RedisServer, redis_server
from tls_redis import needs_tls_binary, tls_binary, write_certificates
from waiting import SAFETY_S, wait_for

from kvtier.calibration.documents import CurveDocument
from kvtier.calibration.store.directory import open_store
from kvtier.calibration.store.redis import RedisStore
from kvtier.config import load_settings

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


def status(server: DemoServer) -> dict[str, Any]:
    return server.state()["retention"]


def newest(server: DemoServer) -> dict[str, Any]:
    return status(server)["recent"][-1]


class Load:
    """Requests over fresh contexts, one after another, until stopped."""

    def __init__(self, server: DemoServer) -> None:
        self.server, self.rng = server, random.Random(0)
        self.done, self.failures = 0, []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            prompt = [self.rng.randrange(136, 384) for _ in range(PROMPT_TOKENS)]
            try:
                answer = self.server.generate(prompt, 2)
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
            "KVTIER_HEAD_PROFILE": str(DEMO_MODEL / "head_profile.json"),
            "KVTIER_LOCALITY_SINK_TOKENS": str(SINK),
            "KVTIER_LOCALITY_RECENT_TOKENS": str(RECENT),
            "KVTIER_LOCALITY_BRANCH_RECENT_TOKENS": "16",
            "KVTIER_QUALITY": str(QUALITY),
            "KVTIER_CALIBRATION_POLL_S": "0.2",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        # Idle servers poll; several processes share the cores of a small machine here.
        flags = ("--max-total-tokens", "8192", "--sleep-on-idle", "--enable-metrics")
        server = stack.enter_context(demo_server(tmp_path, *flags))
        load = Load(server)
        stack.callback(load.stop)

        wait_for(lambda: "no-curve" in status(server)["reasons"], "a turn without a curve")
        calibrate(tmp_path / "out")
        wait_for(lambda: "quality" in status(server)["reasons"], "the curve")

        redis.process.kill()
        redis.process.wait()
        wait_for(lambda: status(server)["calibration"]["unavailable"] > 0, "the outage noticed")
        before = load.done
        wait_for(lambda: load.done > before, "serving on")
        assert newest(server)["reason"] == "quality", "by the last known curve"

        redis.socket.unlink(missing_ok=True)
        redis.start()
        changed = change_curve()

        def goes_by_it() -> bool:
            turn = newest(server)
            return abs(turn["retention"] - share_kept(changed, turn["nll"])) < 0.01

        wait_for(goes_by_it, "a changed curve without a restart")
        load.stop()
        found = server.samples()
    assert load.failures == []
    assert load.done >= 10
    assert PASSWORD not in (tmp_path / "server.log").read_text()
    assert found["kvtier_turns_total quality"] >= 5
    assert found["kvtier_turns_total no-curve"] >= 1
    assert found["kvtier_calibration_events_total unavailable"] >= 1
    assert found["kvtier_quality_target"] == QUALITY
    turns = sum(v for k, v in found.items() if k.startswith("kvtier_turns_total"))
    assert found["kvtier_retained_share_count"] == turns
    assert 0 < found["kvtier_retained_tokens_total"] < found["kvtier_prompt_tokens_total"]
    # A prompt that begins as another did adds a little less.
    assert found["kvtier_prompt_tokens_total"] == pytest.approx(turns * PROMPT_TOKENS, rel=0.02)
    assert found["kvtier_predicted_quality_count"] >= 5


def calibrate(out: Path) -> None:
    """A real calibration, small: one curve over short contexts."""
    command = [
        *(sys.executable, "-m", "kvtier", "calibrate", "curve", "--model-path", str(DEMO_MODEL)),
        *("--len", "1k", "--contexts", "4", "--out", str(out)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SAFETY_S)
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

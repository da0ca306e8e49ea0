"""The cpu-demo's Pod as processes: both containers with the flags and settings of the manifest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from live_server import ask, free_port, metric, running, wait_until_healthy
from waiting import SAFETY_S, wait_for

from deploy.checks.manifests import Container, Manifests
from deploy.checks.rendering import DEPLOY

pytestmark = pytest.mark.engine

DEMO_MODEL = DEPLOY.parent / "models" / "kvtier-demo"
PROMPT_TOKENS = 600


class Demo:
    """Paths and ports of a container are moved to where they are free here, and nothing else is.

    folder: short, because the path of a socket has to be.
    """

    def __init__(self, manifests: Manifests, folder: Path) -> None:
        (workload,) = manifests.workloads
        self.manifests, self.folder = manifests, folder
        self.grace_s = workload.pod["terminationGracePeriodSeconds"]
        self.containers = {one.name: one for one in workload.containers}
        self.port, self.metrics = free_port(), free_port()
        self.moved = {
            "/opt/kvtier/models/kvtier-demo": str(DEMO_MODEL),
            "/run/kvtier": str(folder),
            "0.0.0.0": "127.0.0.1",
            "=30000": f"={self.port}",
            "=9400": f"={self.metrics}",
        }

    def here(self, text: str) -> str:
        for theirs, ours in self.moved.items():
            text = text.replace(theirs, ours)
        return text

    def running(self, name: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
        container: Container = self.containers[name]
        program, *words = map(self.here, self.manifests.expanded(container))
        assert program == "kvtier"
        settings = self.manifests.environment(container)
        settings = {key: self.here(value) for key, value in settings.items() if key != "HOME"}
        command = [sys.executable, "-m", "kvtier", *words]
        log = self.folder / f"{name}.log"
        return running(command, log, env=os.environ | settings, cwd=self.folder)

    def ask(self, path: str, body: object = None, key: str | None = None) -> tuple[int, str]:
        """The status and text of the engine's answer."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return ask(f"http://127.0.0.1:{self.port}{path}", body, headers)


def test_it_answers_locks_its_management_and_ends_with_its_turns_in_the_tier(rendered):
    with tempfile.TemporaryDirectory(prefix="kvd") as name:
        demo = Demo(rendered["cpu-demo"], Path(name))
        with demo.running("tier") as tier, demo.running("engine") as engine:
            log = demo.folder / "engine.log"
            wait_until_healthy(f"http://127.0.0.1:{demo.port}", engine, log)
            wait_for(lambda: demo.ask("/ready")[0] == 200)
            answers(demo)
            management_is_locked(demo)
            assert f"\n{scaled_by(rendered['watched'])}{{" in demo.ask("/metrics")[1]
            engine.terminate()
            # While it drains, the router and the Service see this.
            wait_for(lambda: not_ready(demo, engine))
            assert engine.wait(SAFETY_S) == 0
            assert metric(demo.metrics, "kvtier_tier_blobs") >= PROMPT_TOKENS // 256
            tier.terminate()
            assert tier.wait(SAFETY_S) == 0


def scaled_by(manifests: Manifests) -> str:
    """The metric that KEDA asks Prometheus for."""
    (scaled,) = manifests.of_kind("ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    (name,) = re.findall(r"\bsglang:\w+", trigger["metadata"]["query"])
    return name


def answers(demo: Demo) -> None:
    prompt = [6 + i % 300 for i in range(PROMPT_TOKENS)]
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    status, text = demo.ask("/generate", body)
    assert (status, len(json.loads(text)["output_ids"])) == (200, 4)
    models = json.loads(demo.ask("/v1/models")[1])["data"]
    assert [one["id"] for one in models] == ["kvtier-demo"]


def management_is_locked(demo: Demo) -> None:
    """Check that management wants the key, which is the Pod's uid; a text stands for it here."""
    assert demo.ask("/flush_cache", {})[0] == 401
    assert demo.ask("/flush_cache", {}, key="a-guess")[0] == 401
    assert demo.ask("/flush_cache", {}, key="<fieldRef>")[0] == 200


def not_ready(demo: Demo, engine: subprocess.Popen[bytes]) -> bool:
    """503, or it has ended by now."""
    try:
        return demo.ask("/ready")[0] == 503
    except OSError:
        return engine.poll() is not None

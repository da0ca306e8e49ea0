"""The production router, with its manifest's flags, finds real engines by the Pods of an emulated
Kubernetes API: those that are ready, as long as they are there."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from live_server import free_port, serving
from routed import ADDRESSES, MODEL, Router, emulated_cluster, routing

from deploy.checks.rendering import DEPLOY

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SESSIONS = 12


@contextmanager
def engines(folder: Path, port: int) -> Iterator[None]:
    """One at each address."""
    model = DEPLOY.parent / "models" / MODEL
    with ExitStack() as all_of_them:
        for name, address in ADDRESSES.items():
            command = [
                sys.executable, "-m", "kvtier", "serve", "--model-path", str(model),
                "--device", "cpu", "--dtype", "float32", "--host", address, "--port", str(port),
                "--served-model-name", MODEL, "--max-total-tokens", "4096", "--skip-server-warmup",
                "--log-level", "warning",
            ]  # fmt: skip
            log = folder / f"{name}.log"
            all_of_them.enter_context(serving(command, port, log=log, host=address))
        yield


def all_answer(router: Router) -> None:
    for session in range(SESSIONS):
        # Every request has to name its model where engines are discovered.
        body = {"model": MODEL, "prompt": f"{session} is", "max_tokens": 2, "ignore_eos": True}
        found = router.ask("/v1/completions", body, {"x-session-id": f"session-{session}"})
        assert found["usage"]["completion_tokens"] == 2


def test_engines_come_when_their_pods_are_ready_and_go_with_them(rendered):
    port = free_port()
    router = Router(rendered["production"], port)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd")))
        cluster = stack.enter_context(emulated_cluster(folder))
        stack.enter_context(engines(folder, port))
        cluster.add("engine-0", ADDRESSES["engine-0"], ready=True, labels=cluster.labels)
        cluster.add("engine-1", ADDRESSES["engine-1"], ready=False, labels=cluster.labels)
        cluster.add("other", "127.0.0.4", ready=True, labels={"app.kubernetes.io/name": "other"})
        log = stack.enter_context(routing(router, cluster, folder))
        try:
            router.knows("engine-0")
            all_answer(router)
            cluster.becomes_ready("engine-1")
            router.knows("engine-0", "engine-1")
            all_answer(router)
            cluster.delete("engine-0")
            router.knows("engine-1")
            all_answer(router)
        except BaseException:
            print(log.read_text()[-6000:], router.engines())
            raise

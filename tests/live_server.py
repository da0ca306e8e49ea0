"""A live server for tests: started, waited for, and stopped with everything it started."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

from waiting import SAFETY_S, wait_for


def free_port() -> int:
    """A loopback port that was free a moment ago, below those that the kernel hands out: a server
    that starts for a minute finds it free still, whatever listens anywhere meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def serving(
    command: list[str], port: int, *, log: Path, cwd: Path | None = None, host: str = "127.0.0.1"
) -> Iterator[str]:
    """Run a server command until it is healthy on `port`; yields its URL."""
    url = f"http://{host}:{port}"
    with log.open("wb") as stream:
        server = subprocess.Popen(
            command, stdout=stream, stderr=stream, start_new_session=True, cwd=cwd
        )
    try:
        wait_until_healthy(url, server, log)
        yield url
    finally:
        stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    """End a server and all that it started: at once, as SGLang takes seconds to see a SIGTERM."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Fails at once where the server ends instead."""

    def healthy() -> bool:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=SAFETY_S) as answer:
                return answer.status == 200
        except (OSError, HTTPException):
            return False

    wait_for(healthy, lambda: f"no answer: {log.read_text()[-4000:]}")

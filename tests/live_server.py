"""A live server for tests: started, waited for, and stopped with everything it started."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from waiting import SAFETY_S, wait_for


def free_port() -> int:
    """A loopback port that was free a moment ago, below those that the kernel hands out: a server
    that starts for a minute finds it free still, whatever listens anywhere meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def listens(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


def ask(
    url: str, body: object = None, headers: Mapping[str, str] = {}, method: str | None = None
) -> tuple[int, str]:
    """The status and the text of an answer. body: of the question, sent as JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json", **headers}, method=method)
    try:
        with urlopen(request, timeout=SAFETY_S) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def metric(port: int, name: str) -> float:
    """The value of a metric without labels at a loopback port."""
    lines = ask(f"http://127.0.0.1:{port}/metrics")[1].splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


@contextmanager
def running(command: Sequence[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A command that goes on until it is stopped. log: of what it prints; options: Popen's."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, start_new_session=True, **options
        )
    try:
        yield process
    finally:
        stop(process)


@contextmanager
def serving(
    command: list[str], port: int, *, log: Path, cwd: Path | None = None, host: str = "127.0.0.1"
) -> Iterator[str]:
    """Run a server command until it is healthy on `port`; yields its URL."""
    url = f"http://{host}:{port}"
    with running(command, log, cwd=cwd) as server:
        wait_until_healthy(url, server, log)
        yield url


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
            return ask(f"{url}/health")[0] == 200
        except (OSError, HTTPException):
            return False

    wait_for(healthy, lambda: f"no answer: {log.read_text()[-4000:]}")

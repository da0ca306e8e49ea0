"""Real servers of a benchmark: started, watched, killed on purpose, and all gone at its end.

Every one has a process group of its own and a log. The error of one that ends by itself has the
last lines of its log.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from benchmarks.common.benchmark import ROOT
from benchmarks.common.redis_binary import redis_binary
from benchmarks.common.remote import clean_environment
from kvtier.bench.runner import stop_group
from kvtier.errors import KvtierError

START_S = 600.0
LOOK_S, CLOSE_LOOK_S = 0.2, 0.005
LOG_TAIL_LINES = 40
# SGLang pins what its LoRA layers copy to a GPU, which wants a driver; this turns it off.
UNPINNED = ROOT / "tests" / "engine" / "weights" / "unpinned"


class ProcessError(KvtierError):
    """A benchmark cannot go on: a process ended by itself, or did not start."""


class Served:
    """One process that can be started again and again, with the same command or another.

    ready: whether it answers; asked until it does. accepts: whether it accepts connections; asked
    until it does not when it is killed. environment: without other KVTIER_* variables.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        ready: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
        accepts: Callable[[], bool] = lambda: False,
    ) -> None:
        self.accepts = accepts
        self.name, self.command, self.ready = name, list(command), ready
        self.environment = dict(environment or {})
        self.log = folder / f"{name}.log"
        self.starts = 0
        self._wanted = self._answers = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was not started"
        return self._process.pid

    def launch(self) -> None:
        """Start it; it need not answer yet."""
        with self.log.open("ab") as stream:
            self._process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=clean_environment() | {"OMP_NUM_THREADS": "1"} | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        self._wanted, self._answers = True, False
        self.starts += 1

    def wait_ready(self) -> None:
        """Raises ProcessError where it ends or does not answer within START_S."""
        deadline = time.monotonic() + START_S
        while not self.ready():
            self.check()
            if not self._wanted:
                raise ProcessError(f"{self.name} was ended while it started")
            if time.monotonic() > deadline:
                raise ProcessError(f"{self.name} did not answer in time:\n{self.tail()}")
            time.sleep(LOOK_S)
        self._answers = True

    def start(self) -> None:
        self.launch()
        self.wait_ready()

    def kill(self) -> None:
        """kill -9 of all its processes, and wait until the first one is gone and nobody listens
        where it did: the kernel closes a large process's sockets some time after its death."""
        self._wanted = False
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
            while self.accepts():
                time.sleep(CLOSE_LOOK_S)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """SIGSTOP of all its processes, which go on when the block ends."""
        os.killpg(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.pid, signal.SIGCONT)

    def stop(self, grace_s: float = 40) -> None:
        """SIGTERM, and what is left after that time is killed. Its exit code is its own matter."""
        self._wanted = False
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        # An engine looks after a SIGTERM every 5 s, drains, and ends its scheduler 15 s later.
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        stop_group(process)

    def check(self) -> None:
        """Raises ProcessError where it ended by itself."""
        if self._wanted and self._process is not None and self._process.poll() is not None:
            code = self._process.returncode
            raise ProcessError(f"{self.name} ended by itself (exit code {code}):\n{self.tail()}")

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def resident_bytes(self) -> int | None:
        """Resident bytes of it and all processes below it; None while it does not serve."""
        process = self._process
        serves = self._wanted and self._answers
        if not serves or process is None or process.poll() is not None:
            return None
        first, total = psutil.Process(process.pid), 0
        for one in (first, *first.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += one.memory_info().rss
        return total


def free_address() -> str:
    """An address where nothing listens, for one service after the other, and for none.

    Below the ports that connections of this host are given: one of those would have it when a
    service that was killed starts again.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(first_given // 2, first_given), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return f"127.0.0.1:{port}"
    raise RuntimeError("no port is free")


def answers_http(url: str) -> bool:
    """Return whether a server says that it is healthy."""
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def accepts(host: str, port: str) -> bool:
    """Return whether anybody accepts connections there."""
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def answers_socket(path: Path) -> bool:
    """Return whether a process accepts connections at a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def redis_process(folder: Path) -> tuple[Served, str]:
    """A Redis that keeps what it was told when it is killed, and its URL."""
    path = folder / "redis.sock"
    command = [
        redis_binary(), "--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700",
        "--dir", str(folder), "--save", "", "--appendonly", "yes", "--appendfsync", "always",
    ]  # fmt: skip
    return Served("redis", command, folder, partial(answers_socket, path)), f"unix://{path}"


def tier_process(folder: Path, memory: str, disk: str) -> tuple[Served, str]:
    """A tier service on memory and disk, and its address."""
    path = folder / "tier.sock"
    command = [
        sys.executable, "-m", "kvtier_tierd", "--listen", f"unix:{path}",
        "--store", "memory+disk", "--memory", memory, "--disk-path", str(folder / "disk" / "store"),
        "--disk", disk,
    ]  # fmt: skip
    return Served("tier", command, folder, partial(answers_socket, path)), f"unix:{path}"


def server_process(
    name: str, module: Sequence[str], flags: Sequence[str], folder: Path
) -> tuple[Served, str]:
    """An SGLang server, of stock SGLang or kvtier's, and its URL. module: after `python -m`."""
    host, port = free_address().split(":")
    url = f"http://{host}:{port}"
    paths = [str(UNPINNED), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-m", *module, *flags, "--host", host, "--port", port]
    ready, listening = partial(answers_http, url), partial(accepts, host, port)
    return Served(name, command, folder, ready, environment, listening), url

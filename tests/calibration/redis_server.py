"""Real Redis servers for tests: started on a socket of their own, and ended with everything."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis
from pausing import pause, resume
from waiting import wait_for

from benchmarks.common.redis_binary import redis_binary


class RedisServer:
    """One redis-server process. `admin` is a plain client that no test restricts."""

    def __init__(self, *options: str, binary: str | None = None) -> None:
        # A socket path must be short, and pytest's folders are not.
        self.directory = Path(tempfile.mkdtemp(prefix="kvr"))
        self.socket = self.directory / "s"
        self._command = [
            binary or redis_binary(), "--port", "0", "--unixsocket", str(self.socket),
            "--dir", str(self.directory), "--save", "", *options,
        ]  # fmt: skip
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.admin = redis.Redis(unix_socket_path=str(self.socket))
        wait_for(lambda: self._answers() or self.process.poll() is not None)
        if self.process.poll() is not None:
            self.stop()
            raise AssertionError(f"{self._command} did not start")

    def _answers(self) -> bool:
        try:
            return bool(self.admin.ping())
        except redis.ConnectionError:
            return False

    def pause(self) -> None:
        pause(self.process.pid)

    def resume(self) -> None:
        resume(self.process.pid)

    def stop(self) -> None:
        self.admin.close()
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self.socket.unlink(missing_ok=True)

    def calls(self) -> dict[str, Any]:
        """Return how often each command was called, by name."""
        stats = self.admin.info("commandstats")
        return {name.removeprefix("cmdstat_"): one["calls"] for name, one in stats.items()}

    def add_user(self, name: str, password: str, *rules: str) -> str:
        """Make an ACL user; returns the URL it logs in with."""
        self.admin.execute_command("ACL", "SETUSER", name, "on", f">{password}", *rules)
        return f"unix://{name}:{quote(password, safe='')}@{self.socket}"


@contextmanager
def redis_server(*options: str, binary: str | None = None) -> Iterator[RedisServer]:
    server = RedisServer(*options, binary=binary)
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(server.directory, ignore_errors=True)

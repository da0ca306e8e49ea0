"""A real mooncake_master on free ports, and stores of it."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from live_server import free_port, listens
from pausing import pause, resume
from store_blobs import blob_name, payload_of, put
from waiting import wait_for

from kvtier.errors import TierExhaustedError, TierUnavailableError
from kvtier_tierd.stores.mooncake.options import MooncakeOptions
from kvtier_tierd.stores.mooncake.store import MooncakeStore

MIB = 1 << 20
NAME = "mooncake_master"
CLIENT_TTL_S = 2  # seconds without a heartbeat after which the master drops a segment
TIMEOUT_S = 2.0
SEGMENT = 16 * MIB
prefixes = (f"test-{number}" for number in itertools.count())


def missing() -> str:
    """Return why there can be no master; empty when there can."""
    binary = program()
    if binary is None or not binary.is_file():
        return f"needs pip install mooncake-transfer-engine-non-cuda, with {binary or NAME}"
    checked = subprocess.run([binary, "--version"], capture_output=True, text=True)
    if "shared libraries" in checked.stderr:
        return f"needs apt-get install libcurl4 libibverbs1 libnuma1: {checked.stderr.strip()}"
    return ""


def program() -> Path | None:
    """Return the master's binary, where the package is installed."""
    spec = importlib.util.find_spec("mooncake")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / NAME


class MooncakeMaster:
    """One master; may be stopped and started again at the same address."""

    def __init__(self, *flags: str) -> None:
        self.flags = flags
        self.port, self.metrics_port, self.metadata_port = (free_port() for _ in range(3))
        self.process: subprocess.Popen[bytes] | None = None
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def metadata(self) -> str:
        return f"http://127.0.0.1:{self.metadata_port}/metadata"

    def start(self) -> None:
        command = [
            str(program()),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self.metrics_port}",
            "--http_metadata_server_host=127.0.0.1",
            f"--http_metadata_server_port={self.metadata_port}",
            f"--client_ttl={CLIENT_TTL_S}",
            "--logtostderr=true",
            *self.flags,
        ]
        self.process = process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        ports = [self.port]
        if "--enable_http_metadata_server=true" in self.flags:
            ports.append(self.metadata_port)

        def is_up() -> bool:
            assert process.poll() is None, f"the master ended: {self._said()[-2000:]}"
            return all(listens("127.0.0.1", port) for port in ports)

        wait_for(is_up, lambda: f"no master: {self._said()[-2000:]}")

    def _said(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def dropped(self) -> int:
        """Return how many segments of silent services it has dropped."""
        return self._said().count("action=unmount_expired")

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Have it hang, with its connections open."""
        assert self.process is not None
        pause(self.process.pid)
        try:
            yield
        finally:
            resume(self.process.pid)

    def stop(self) -> None:
        """Kill it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> MooncakeMaster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.log.close()


def options_of(master: MooncakeMaster, prefix: str = "", **others: Any) -> MooncakeOptions:
    """Return the options of a small service; with a prefix of its own unless it is to share one."""
    given = {"segment_bytes": SEGMENT, "buffer_bytes": 64 * MIB, "timeout_s": TIMEOUT_S} | others
    return MooncakeOptions(master=master.address, prefix=prefix or next(prefixes), **given)


@asynccontextmanager
async def opened(options: MooncakeOptions, quotas: Any = None) -> Any:
    store = MooncakeStore(options, quotas)
    try:
        await store.start()
        yield store
        assert store.check_integrity() == []
    finally:
        await store.close()


async def puts(store: MooncakeStore, number: int, num_bytes: int = MIB) -> bool:
    """Return whether a put works, which may fail as the interface allows only."""
    try:
        await put(store, blob_name(number), payload_of(number, num_bytes))
    except (TierUnavailableError, TierExhaustedError):
        return False
    return True

"""Tier services for tests: a real process that can be killed, stopped and started again, and one
in a thread of the test's own process, whose insides can be looked at."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import live_server
import pytest
from pausing import pause, resume
from waiting import SAFETY_S

from kvtier.tier.blobs.payload import checksum, record_layout
from kvtier.tier.client import Blob, Landing, Offer, TierClient
from kvtier.v1 import tier_pb2, tier_pb2_grpc
from kvtier_tierd.options import TierOptions
from kvtier_tierd.server import TierServer
from kvtier_tierd.stores.memory import MemoryOptions

LAYOUT = record_layout("test")
PUT_BYTES = 1 << 20  # of a chunk

Result = TypeVar("Result")


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def payload_of(number: int, num_bytes: int = 10_000) -> bytes:
    return random.Random(number).randbytes(num_bytes)


def blob_of(number: int, num_bytes: int = 10_000) -> Blob:
    return Blob(key_of(number), LAYOUT, [payload_of(number, num_bytes)])


@contextmanager
def connected(tier: Any, namespace: str = "default", **options: Any) -> Iterator[TierClient]:
    """A client of a service, patient, that has asked who is there."""
    with TierClient(tier.address, namespace, timeout_s=SAFETY_S, **options) as client:
        client.connect()
        yield client


@contextmanager
def raw_stub(address: str) -> Iterator[tier_pb2_grpc.TierServiceStub]:
    """Open a stub for what a client of ours would never say."""
    with grpc.insecure_channel(address) as channel:
        yield tier_pb2_grpc.TierServiceStub(channel)


def header_of(blob: Blob, namespace: str = "default", **changes: Any) -> tier_pb2.BlobHeader:
    right = {
        "key": blob.key,
        "num_bytes": blob.num_bytes,
        "layout": blob.layout,
        "checksum": checksum(blob.key, namespace, blob.layout, blob.payload),
    }
    return tier_pb2.BlobHeader(**right | changes)


@contextmanager
def failing(code: grpc.StatusCode, said: str = "") -> Iterator[None]:
    """Check that a call in here fails with this status, and says this."""
    with pytest.raises(grpc.RpcError) as caught:
        yield
    assert caught.value.code() is code, caught.value.details()
    assert said in caught.value.details()


def whose(namespace: str) -> list[tuple[str, str]]:
    return [("kvtier-namespace", namespace)]


@contextmanager
def stalled_put(stub, number, num_bytes=10_000, sent_bytes=0, namespace="default"):
    """A put of which only the first bytes come until `go_on` is set; yields the call and that."""
    payload, go_on = payload_of(number, num_bytes), threading.Event()

    def parts():
        header = header_of(blob_of(number, num_bytes), namespace)
        yield tier_pb2.PutRequest(header=header)
        for begin in range(0, sent_bytes, PUT_BYTES):
            yield tier_pb2.PutRequest(chunk=payload[begin : min(begin + PUT_BYTES, sent_bytes)])
        go_on.wait(SAFETY_S)
        for begin in range(sent_bytes, num_bytes, PUT_BYTES):
            yield tier_pb2.PutRequest(chunk=payload[begin : begin + PUT_BYTES])

    call = stub.Put.future(parts(), metadata=whose(namespace))
    try:
        yield call, go_on
    finally:
        call.cancel()
        go_on.set()


def fetch(
    client: TierClient, keys: Sequence[bytes], num_bytes: int = 1 << 20
) -> tuple[list[Landing], dict[int, bytes]]:
    """Outcomes of a get, and the bytes of the blobs that landed, by position."""
    buffers: dict[int, bytearray] = {}

    def land(offer: Offer) -> memoryview:
        buffer = buffers[offer.position] = bytearray(offer.num_bytes)
        return memoryview(buffer)

    outcome = client.get(keys, land, num_bytes)
    good = {i: bytes(b) for i, b in buffers.items() if outcome[i] is Landing.LANDED}
    return outcome, good


class LiveTier:
    """`python -m kvtier_tierd` with flags; restarted on the address it had. log: its stderr."""

    def __init__(self, directory: Path, *flags: str, listen: str = "127.0.0.1:0") -> None:
        self.directory, self.flags, self.address = directory, flags, listen
        self.log = directory / "tier.log"
        self.metrics_url = ""
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> LiveTier:
        command = [sys.executable, "-m", "kvtier_tierd", "--listen", self.address, *self.flags]
        if not self.address.startswith("unix:"):
            command.append("--insecure-local")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=self.directory
            )
        self.address = self._line().rpartition(" ")[2]
        if "--metrics-port" in self.flags:
            self.metrics_url = self._line().rpartition(" ")[2]
        return self

    def _line(self) -> str:
        assert self.running.stdout is not None
        line = self.running.stdout.readline().strip()
        assert line, f"it did not start: {self.log.read_text()[-2000:]}"
        return line

    @property
    def running(self) -> subprocess.Popen[str]:
        assert self.process is not None
        return self.process

    def signal(self, number: int) -> None:
        self.running.send_signal(number)

    def pause(self) -> None:
        pause(self.running.pid)

    def resume(self) -> None:
        resume(self.running.pid)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """The exit code."""
        with self.running as ended:
            code = ended.wait(SAFETY_S)
        self.process = None
        return code

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def stop(self) -> None:
        """However it is, end it."""
        if self.process is not None:
            self.resume()
            self.kill()


@contextmanager
def live_tier(directory: Path, *flags: str, listen: str = "127.0.0.1:0") -> Iterator[LiveTier]:
    """A started LiveTier without shared memory, unless the flags say otherwise."""
    if "--shared-memory" not in flags:
        flags = (*flags, "--shared-memory", "off")
    tier = LiveTier(directory, *flags, listen=listen)
    try:
        yield tier.start()
    finally:
        tier.stop()


class InProcessTier:
    """A TierServer in a thread and event loop of its own."""

    def __init__(self, options: TierOptions) -> None:
        self.is_down = False
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="tier-under-test")
        self.thread.start()
        try:
            self.server = self.call(lambda: TierServer(options))
            self.run(self.server.start())
        except BaseException:
            self._end_loop()
            raise

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run something where the service runs."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(SAFETY_S)

    def call(self, function: Callable[[], Result]) -> Result:
        async def called() -> Result:
            return function()

        return self.run(called())

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def store(self) -> Any:
        return self.server.store

    def transfers(self, namespace: str = "default") -> int:
        """Return how many puts and gets of a namespace are under way."""
        return self.server.service.namespaces._in_flight[namespace]

    def problems(self) -> list[str]:
        """Return what is wrong with the store; and what is still held of it though no client is
        there."""

        def look() -> list[str]:
            found = self.store.check_integrity()
            pins = sum(entry.pins for entry in self.store.account.entries.values())
            reserved = self.store.account.reserved.total()
            leases = len(self.server.service.leases)
            on_way = self.server.budget.used_bytes
            if pins or reserved or leases or on_way:
                held = f"{pins} pins, {reserved} bytes reserved, {on_way} on their way"
                found.append(f"{held}, {leases} leases")
            return found

        return self.call(look)

    def shut_down(self) -> None:
        """Shut down as SIGTERM does, once."""
        if not self.is_down:
            self.is_down = True
            self.run(self.server.stop())

    def stop(self) -> None:
        try:
            self.shut_down()
        finally:
            self._end_loop()

    def _end_loop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(SAFETY_S)
        self.loop.close()


@contextmanager
def in_process(**options: Any) -> Iterator[InProcessTier]:
    """A service of 16 MiB on a free port; nothing may be left held at its end."""
    right = {"listen": "127.0.0.1:0", "store": MemoryOptions(16 << 20), "drain_s": 1.0}
    options = right | {"insecure_local": True} | options
    tier = InProcessTier(TierOptions(**options))
    try:
        yield tier
    finally:
        tier.stop()


def ask(tier: InProcessTier, path: str) -> tuple[int, str]:
    """The status and the text of an answer of the service over HTTP."""
    return live_server.ask(f"http://127.0.0.1:{tier.server.web.server_port}{path}")

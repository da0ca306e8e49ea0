"""Calls of clients that take and do not use."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace

import grpc
from live_tier import (
    blob_of,
    header_of,
    key_of,
    payload_of,
)
from waiting import SAFETY_S, wait_for

from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd import limits

MIB = 1 << 20
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def whose(namespace):
    return [("kvtier-namespace", namespace)]


@contextmanager
def stalled_put(stub, number, num_bytes, sent_bytes, namespace="default"):
    """A put of which only the first bytes come while the block lasts; yields the call."""
    payload, go_on = payload_of(number, num_bytes), threading.Event()

    def parts():
        header = header_of(blob_of(number, num_bytes), namespace)
        yield pb.PutRequest(header=header)
        for begin in range(0, sent_bytes, MIB):
            yield pb.PutRequest(chunk=payload[begin : min(begin + MIB, sent_bytes)])
        go_on.wait(SAFETY_S)
        for begin in range(sent_bytes, num_bytes, MIB):
            yield pb.PutRequest(chunk=payload[begin : begin + MIB])

    call = stub.Put.future(parts(), metadata=whose(namespace))
    try:
        yield call, go_on
    finally:
        call.cancel()
        go_on.set()


def transfers(tier, namespace="default"):
    return tier.server.service.namespaces._in_flight[namespace]


class Patience:
    """A service's patience with its clients, which runs out when a test says so, not by a clock."""

    def __init__(self, monkeypatch) -> None:
        self._waits: list[asyncio.Timeout] = []
        self._ran_out = 0
        stand_in = SimpleNamespace(timeout=self._timeout, sleep=asyncio.sleep)
        monkeypatch.setattr(limits, "asyncio", stand_in)

    @asynccontextmanager
    async def _timeout(self, _allowed_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.append(wait)
                try:
                    yield
                finally:
                    self._waits.remove(wait)
        except TimeoutError:
            self._ran_out += 1
            raise

    def runs_out(self, tier, stub) -> None:
        """Wait until the service waits for a client that does nothing, and end that wait."""
        before = self._ran_out

        def look() -> bool:
            if self._ran_out == before and self._is_blocked(tier, stub):
                tier.call(lambda: [wait.reschedule(0.0) for wait in self._waits])
            return self._ran_out > before

        wait_for(look)

    def _is_blocked(self, tier, stub) -> bool:
        """Return whether the service waits for the same message after other calls of that client
        have come and been answered: whatever had room was sent before them."""
        waits = tier.call(lambda: list(self._waits))
        for _ in range(3):
            stub.Exists(pb.ExistsRequest(keys=[key_of(1)]))
        return bool(waits) and tier.call(lambda: list(self._waits)) == waits

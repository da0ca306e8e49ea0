"""A link to a tier that is in a test's hands."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from waiting import SAFETY_S, wait_for

from kvtier.errors import TierUnavailableError
from kvtier.tier.blobs.payload import record_layout
from kvtier.tier.client import Blob
from kvtier.tier.link.breaker import Breaker
from kvtier.tier.link.link import TierLink

LAYOUT = record_layout("test")
BUDGET = 1000


def blob_of(number: int, num_bytes: int = 100) -> Blob:
    return Blob(number.to_bytes(32, "big"), LAYOUT, [bytes(num_bytes)])


class FakeClient:
    """A tier in a test's hands: `gate` lets puts through, `fails` is raised by every call."""

    address = "there:1"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.fails: BaseException | None = None
        self.stored: list[Blob] = []
        self.known: set[bytes] = set()
        self.calls = self.connects = 0
        self.closed = False

    def connect(self) -> None:
        self.connects += 1
        if self.fails is not None:
            raise self.fails

    def put(self, blob: Blob, *, replace: bool = False) -> bool:
        self.calls += 1
        assert self.gate.wait(SAFETY_S) or self.closed
        if self.closed:
            raise TierUnavailableError("cut off")
        if self.fails is not None:
            raise self.fails
        if blob.key in self.known and not replace:
            return False
        self.known.add(blob.key)
        self.stored.append(blob)
        return True

    def close(self) -> None:
        self.closed = True
        self.gate.set()


@contextmanager
def linked(**options: Any) -> Iterator[tuple[TierLink, FakeClient]]:
    client = FakeClient()
    breaker = options.pop("breaker", None) or Breaker(first_s=0.02, longest_s=0.05)
    link = TierLink(client, buffer_bytes=BUDGET, breaker=breaker, **options)
    try:
        yield link, client
    finally:
        link.close()
        assert not any(thread.is_alive() for thread in link._threads)


def hold_the_put_thread(link, client):
    """A put under way that does not end until `client.gate` is set."""
    client.gate.clear()
    assert link.put([blob_of(10_000, 1)]) == 1
    wait_for(lambda: client.calls == 1)


def fail(link, times: int) -> None:
    """Calls that fail, until the breaker opens."""
    for _ in range(times):
        assert link.submit(lambda client: client.put(blob_of(1))).wait(SAFETY_S)

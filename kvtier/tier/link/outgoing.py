"""Puts on their way to the tier: in which order they go, and what they hold until they are over.

append ──> [ waiting ... ] ── next ──> under way ── over ──>
               │     ↑                     │
            shed     └────── put_back ─────┘
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextvars import Context
from typing import NamedTuple

from kvtier.tier.client import Blob, TierClient


class Put(NamedTuple):
    """A blob to store.

    num_bytes: as it was counted when it was queued; ready, reads: see TierLink.put; group: of those
    that belong together, and keep their order; context: of who put it, which it is stored in;
    failures: so far.
    """

    blob: Blob
    replace: bool
    num_bytes: int
    ready: Callable[[TierClient], bool] | None
    reads: AbstractSet[bytes]
    group: object
    context: Context
    failures: int = 0


class Outgoing:
    """The queue of puts. Not thread-safe.

    held_bytes: of all puts on their way; waiting_bytes: of those that wait.
    """

    def __init__(self) -> None:
        self.held_bytes = self.waiting_bytes = 0
        self._waiting: deque[Put] = deque()
        self._on_way: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """Return the number of jobs that wait."""
        return len(self._waiting)

    def append(self, job: Put) -> None:
        self._waiting.append(job)
        self._on_way[job.blob.key] += 1
        self.held_bytes += job.num_bytes
        self.waiting_bytes += job.num_bytes

    def next(self) -> Put:
        """The first one is under way now."""
        job = self._waiting.popleft()
        self.waiting_bytes -= job.num_bytes
        return job

    def put_back(self, job: Put) -> None:
        """Put back a job that was under way: it is the first to wait again."""
        self._waiting.appendleft(job)
        self.waiting_bytes += job.num_bytes

    def over(self, job: Put) -> None:
        """Note that a job that was under way holds nothing any more."""
        self.held_bytes -= job.num_bytes
        self._on_way[job.blob.key] -= 1
        if not self._on_way[job.blob.key]:
            del self._on_way[job.blob.key]

    def shed(self) -> None:
        """The last of those that wait will not go."""
        job = self._waiting.pop()
        self.waiting_bytes -= job.num_bytes
        self.over(job)

    def has_any(self, keys: AbstractSet[bytes]) -> bool:
        """Return whether a blob of these is on its way."""
        return not self._on_way.keys().isdisjoint(keys)

    def go_first(self, keys: AbstractSet[bytes]) -> None:
        """The groups of these, and of what they read, go before all others that wait, in the order
        they have."""
        groups: set[object] = set()
        while more := {job.group for job in self._waiting if job.blob.key in keys} - groups:
            groups |= more
            keys = {key for job in self._waiting if job.group in more for key in job.reads}
        first = [job for job in self._waiting if job.group in groups]
        others = [job for job in self._waiting if job.group not in groups]
        self._waiting = deque(first + others)


__all__ = ["Outgoing", "Put"]

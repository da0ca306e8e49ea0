"""The work that a link has for its threads: fetches, and puts.

    Incoming    append ──> [ waiting ... ] ── next ──> under way
                                            │ ↑
                                       hold │ │ its puts are over, or it has waited long enough
                                            ↓ │
                                         [ held ]

    Outgoing    append ──> [ waiting ... ] ── next ──> under way ── over ──>
                               │     ↑                     │
                            shed     └────── put_back ─────┘

A fetch whose context is still on its way to the tier is held aside, and holds no other up.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from contextvars import Context, copy_context
from typing import Any, Generic, NamedTuple, TypeVar

from kvtier.tier.client import Blob, TierClient

Result = TypeVar("Result")


class Fetch(Generic[Result]):
    """Work under way. done: whether `result` is final. Written by one thread, read by another.

    needs:   names of blobs that the work asks for; called in the background, at most once.
    took_s:  how long the work ran, without waiting for its turn or for what was on its way.
    context: of who made this, which the work runs in.
    """

    def __init__(
        self,
        work: Callable[[TierClient], Result],
        needs: Callable[[], Iterable[bytes]] | None = None,
    ) -> None:
        self.work, self.needs = work, needs
        self.context = copy_context()
        self.took_s = 0.0
        self.result: Result | None = None
        self.cancelled = False
        self._ended = threading.Event()
        self._unwanted: Callable[[Result], None] | None = None
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def end(self, result: Result | None) -> None:
        with self._lock:
            self.result = result
            self._ended.set()
            unwanted = self._unwanted
        if unwanted is not None and result is not None:
            unwanted(result)

    def wait(self, timeout_s: float) -> bool:
        """Returns `done`, after at most `timeout_s`."""
        return self._ended.wait(timeout_s)

    def cancel(self, unwanted: Callable[[Result], None] | None = None) -> None:
        """The result is not wanted any more; work that has not begun will not.

        unwanted: called once with a result that came or comes all the same.
        """
        with self._lock:
            self.cancelled = True
            self._unwanted = unwanted
            result = self.result if self.done else None
        if unwanted is not None and result is not None:
            unwanted(result)


class Held(NamedTuple):
    """A fetch, and the names of the blobs that it waits for. until: time.monotonic()."""

    fetch: Fetch[Any]
    keys: AbstractSet[bytes]
    until: float


class Incoming:
    """The queue of fetches, and those that are held aside. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: deque[Fetch[Any]] = deque()
        self._held: list[Held] = []

    def __len__(self) -> int:
        """Return the number of those that wait, or are held."""
        return len(self._waiting) + len(self._held)

    def append(self, fetch: Fetch[Any]) -> None:
        self._waiting.append(fetch)

    def hold(self, fetch: Fetch[Any], keys: AbstractSet[bytes], longest_s: float) -> None:
        """The fetch, which came out last, waits for these first."""
        self._held.append(Held(fetch, keys, time.monotonic() + longest_s))

    def next(self, over: Callable[[AbstractSet[bytes]], bool]) -> Fetch[Any] | None:
        """The first one that may begin, if there is one. over: whether blobs need not be waited for
        (any longer)."""
        now = time.monotonic()
        for index, held in enumerate(self._held):
            if held.fetch.cancelled or held.until <= now or over(held.keys):
                del self._held[index]
                return held.fetch
        return self._waiting.popleft() if self._waiting else None

    @property
    def pause_s(self) -> float | None:
        """The seconds until the first one that is held has waited long enough; None without any."""
        if not self._held:
            return None
        return max(0.0, min(held.until for held in self._held) - time.monotonic())

    def clear(self) -> Iterable[Fetch[Any]]:
        """Let none wait any more; returns those that did."""
        fetches = [*self._waiting, *(held.fetch for held in self._held)]
        self._waiting.clear()
        self._held.clear()
        return fetches


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

    def prioritize(self, keys: AbstractSet[bytes]) -> None:
        """The groups of these, and of what they read, go before all others that wait, in the order
        they have."""
        groups: set[object] = set()
        while more := {job.group for job in self._waiting if job.blob.key in keys} - groups:
            groups |= more
            keys = {key for job in self._waiting if job.group in more for key in job.reads}
        first = [job for job in self._waiting if job.group in groups]
        others = [job for job in self._waiting if job.group not in groups]
        self._waiting = deque(first + others)

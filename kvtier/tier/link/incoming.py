"""Fetches that wait for their turn: first in, first out, but for those whose context is still on
its way to the tier. They are held aside, and hold no others up.

append ──> [ waiting ... ] ── next ──> under way
                                │ ↑
                           hold │ │ its puts are over, or it has waited long enough
                                ↓ │
                             [ held ]
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from kvtier.tier.link.fetch import Fetch


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


__all__ = ["Incoming"]

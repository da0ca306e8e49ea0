"""Requests that wait for what the tier has of their prompt.

    ask        the request arrived: in the background exact KV comes into host memory
    settled    it waits in the queue until that is there, or until its patience ends
    landed     what came, still the fetch's
    take       it is admitted: the fetch is the caller's
    forget     it ended, or computes: nothing is fetched or held for it any more

Scheduler thread only; the tier is asked in the link's.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from kvtier.tier.link.fetch import Fetch
from kvtier.tier.link.link import TierLink
from kvtier.tier.prefetch.lookup import Landed, Lookup


@dataclass
class PendingFetch:
    """One request's question. asked, deadline: time.monotonic(), the second when it gives up;
    waited_s: until the answer was there."""

    fetch: Fetch[Landed | None]
    asked: float
    deadline: float
    waited_s: float = 0.0

    @property
    def landed(self) -> Landed | None:
        return self.fetch.result if self.fetch.done else None

    def drop(self) -> None:
        """The answer is not wanted (any more)."""
        self.fetch.cancel(_release)


class PendingFetches:
    """See the module docstring."""

    def __init__(self, link: TierLink) -> None:
        self.link = link
        self.counters: Counter[str] = Counter()
        self._pending: dict[str, PendingFetch] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def ask(self, rid: str, lookup: Lookup, patience_s: float) -> None:
        """Ask for a request that has not asked yet."""
        now = time.monotonic()
        self._pending[rid] = PendingFetch(
            self.link.submit(lookup, needs=lookup.needs), now, now + patience_s
        )
        self.counters["asked"] += 1

    def settled(self, rid: str) -> bool:
        """Whether the request need not wait (any longer). One that gives up is forgotten."""
        pending = self._pending.get(rid)
        if pending is None:
            return True
        if pending.fetch.done:
            pending.waited_s = pending.waited_s or time.monotonic() - pending.asked
            return True
        if time.monotonic() < pending.deadline:
            return False
        self.counters["gave_up_waiting"] += 1
        self.forget(rid)
        return True

    def landed(self, rid: str) -> Landed | None:
        pending = self._pending.get(rid)
        return None if pending is None else pending.landed

    def take(self, rid: str) -> PendingFetch | None:
        return self._pending.pop(rid, None)

    def forget(self, rid: str) -> None:
        pending = self._pending.pop(rid, None)
        if pending is not None:
            pending.drop()

    def clear(self) -> None:
        for rid in list(self._pending):
            self.forget(rid)


def _release(landed: Landed | None) -> None:
    if landed is not None:
        landed.host.release()


__all__ = ["PendingFetch", "PendingFetches"]

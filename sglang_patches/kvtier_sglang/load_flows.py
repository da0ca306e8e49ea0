"""Requests that wait for what the tier has of their prompt.

    ask        the request arrived: in the background exact KV comes into host memory
    settled    it waits in the queue until that is there, or until its patience ends
    landed     what came, still the flow's
    take       it is admitted: the flow is the caller's
    forget     it ended, or computes: nothing is fetched or held for it any more

Scheduler thread only; the tier is asked in the link's.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from kvtier.tier.fetch import Fetch
from kvtier.tier.link import TierLink
from kvtier.tier.lookup import Landed, Lookup


@dataclass
class LoadFlow:
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


class LoadFlows:
    """See the module docstring."""

    def __init__(self, link: TierLink) -> None:
        self.link = link
        self.counters: Counter[str] = Counter()
        self._flows: dict[str, LoadFlow] = {}

    def __bool__(self) -> bool:
        return bool(self._flows)

    def ask(self, rid: str, lookup: Lookup, patience_s: float) -> None:
        """Ask for a request that has not asked yet."""
        now = time.monotonic()
        self._flows[rid] = LoadFlow(
            self.link.submit(lookup, needs=lookup.needs), now, now + patience_s
        )
        self.counters["asked"] += 1

    def settled(self, rid: str) -> bool:
        """Whether the request need not wait (any longer). One that gives up is forgotten."""
        flow = self._flows.get(rid)
        if flow is None:
            return True
        if flow.fetch.done:
            flow.waited_s = flow.waited_s or time.monotonic() - flow.asked
            return True
        if time.monotonic() < flow.deadline:
            return False
        self.counters["gave_up_waiting"] += 1
        self.forget(rid)
        return True

    def landed(self, rid: str) -> Landed | None:
        flow = self._flows.get(rid)
        return None if flow is None else flow.landed

    def take(self, rid: str) -> LoadFlow | None:
        return self._flows.pop(rid, None)

    def forget(self, rid: str) -> None:
        flow = self._flows.pop(rid, None)
        if flow is not None:
            flow.drop()

    def clear(self) -> None:
        for rid in list(self._flows):
            self.forget(rid)


def _release(landed: Landed | None) -> None:
    if landed is not None:
        landed.host.release()


__all__ = ["LoadFlow", "LoadFlows"]

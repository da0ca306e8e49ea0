"""The requests that wait for what the tier has of their prompts.

    ask        the request arrived: in the background exact KV comes into host memory
    open       the fetches of which the ranks have not settled yet whether all have their part
    settled    it waits in the queue until that is there, or until its patience ends
    landed     what came, still the fetch's
    take       it is admitted: the fetch is the caller's
    forget     it ended, or computes: nothing is fetched or held for it any more

All of it runs in the scheduler's thread only; the tier is asked in the link's.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from kvtier.tier.blobs.keys import Scope
from kvtier.tier.link.link import TierLink
from kvtier.tier.link.queues import Fetch
from kvtier.tier.prefetch import Landed, Lookup
from kvtier_sglang.ranks import Answer

# These say why what was not on the device did not come from the tier. LOST: it was asked and had it
# not. REFUSED: loading was judged slower than computing, or took too long. FAILED: the tier was
# away, or what it gave could not be used, on this rank or on another.
LOST, REFUSED, FAILED = "lost", "refused", "failed"


@dataclass
class PendingFetch:
    """One request's question.

    scope: the place of its KV in the tier. deadline: time.monotonic() when it gives up.
    came: whether all ranks have their part; None until that is settled.
    """

    fetch: Fetch[Landed | None]
    scope: Scope
    deadline: float
    came: bool | None = None

    @property
    def answer(self) -> object:
        """This rank's answer, see ranks.Awaited."""
        # It is looked at once: it may be done at any moment, and would be lost between two looks.
        if not self.fetch.done:
            return Answer.LOST if time.monotonic() >= self.deadline else Answer.AWAITED
        landed = self.fetch.result
        if landed is None:
            return Answer.LOST
        return landed.begin, landed.stop, landed.exact_stop, landed.places

    def settle(self, *, came: bool) -> None:
        """Note whether all ranks have their parts, see ranks.Awaited."""
        self.came = came

    @property
    def landed(self) -> Landed | None:
        return self.fetch.result if self.came else None

    def drop(self) -> None:
        """Let go of an answer that is not wanted (any more)."""
        self.fetch.cancel(_release)


class PendingFetches:
    """The fetches of one server's requests, see the module docstring."""

    def __init__(self, link: TierLink) -> None:
        self.link = link
        self.counters: Counter[str] = Counter()
        self._pending: dict[str, PendingFetch] = {}
        # The reasons why what did not come has to be computed, of requests that have not ended.
        self.said: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    @property
    def open(self) -> list[PendingFetch]:
        """The fetches that the ranks have not settled, in the order in which they were asked
        for."""
        return [pending for pending in self._pending.values() if pending.came is None]

    def ask(self, rid: str, lookup: Lookup, patience_s: float) -> None:
        """Ask for a request that has not asked yet."""
        deadline = time.monotonic() + patience_s
        self._pending[rid] = PendingFetch(
            self.link.submit(lookup, needs=lookup.needs), lookup.scope, deadline
        )
        self.counters["asked"] += 1
        self.said[rid] = LOST

    def decline(self, rid: str, scope: Scope) -> None:
        """Note that other ranks may ask for the request and this one does not: its part is lost."""
        fetch: Fetch[Landed | None] = Fetch(lambda client: None)
        fetch.end(None)
        self._pending[rid] = PendingFetch(fetch, scope, deadline=time.monotonic())
        self.counters["declined"] += 1

    def settled(self, rid: str) -> bool:
        """Return whether the request need not wait (any longer). One that gets nothing is
        forgotten."""
        pending = self._pending.get(rid)
        if pending is None or pending.came:
            return True
        if pending.came is None:
            return False
        if not pending.fetch.done:
            self.counters["gave_up_waiting"] += 1
            self.said[rid] = REFUSED
        elif pending.fetch.result is not None:
            self.counters["lost_by_another_rank"] += 1
            self.said[rid] = FAILED
        self.forget(rid)
        return True

    def stays_behind(self, rid: str, memory: str) -> None:
        """Forget what was asked for behind another memory than `memory`, behind which the request
        is computed; "" for none."""
        pending = self._pending.get(rid)
        if pending is not None and pending.scope.memory != memory:
            self.forget(rid)

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


__all__ = ["FAILED", "LOST", "REFUSED", "PendingFetch", "PendingFetches"]

"""Exact KV that requests wait for.

    ask        the request arrived: in the background exact KV comes into host memory
    is_ready   it waits in the queue until all ranks have their part, or until its patience ends
    landed     what arrived, until it is restored or cancelled (state.py)

All of it runs in the scheduler's thread only; the tier is asked in the link's.
"""

from __future__ import annotations

import time
from collections import Counter

from kvtier.tier.blobs.keys import Scope
from kvtier.tier.link.link import TierLink
from kvtier.tier.link.queues import Fetch
from kvtier.tier.prefetch import Landed, Lookup
from kvtier_sglang.tier.state import KvWait, TierState

# These say why what was not on the device did not come from the tier. LOST: it was asked and had it
# not. REFUSED: loading was judged slower than computing, or took too long. FAILED: the tier was
# away, or what it gave could not be used, on this rank or on another.
LOST, REFUSED, FAILED = "lost", "refused", "failed"


class TierPrefetch:
    """The fetches for one server's requests, see the module docstring."""

    def __init__(self, link: TierLink) -> None:
        self.link = link
        self.counters: Counter[str] = Counter()

    def ask(self, state: TierState, lookup: Lookup, patience_s: float) -> None:
        """Ask for a request that does not wait yet."""
        deadline = time.monotonic() + patience_s
        fetch = self.link.submit(lookup, needs=lookup.needs)
        state.kv_wait = KvWait(fetch, deadline, lookup.scope)
        self.counters["asked"] += 1
        state.miss_reason = LOST

    def decline(self, state: TierState, scope: Scope) -> None:
        """Note that other ranks may ask for the request and this one does not: its part is lost."""
        fetch: Fetch[Landed | None] = Fetch(lambda client: None)
        fetch.end(None)
        state.kv_wait = KvWait(fetch, time.monotonic(), scope)
        self.counters["declined"] += 1

    def is_ready(self, state: TierState) -> bool:
        """Return whether the request need not wait (any longer). The wait of one that gets nothing
        is over."""
        wait = state.kv_wait
        if wait is None or wait.arrived:
            return True
        if wait.arrived is None:
            return False
        if not wait.fetch.done:
            self.counters["gave_up_waiting"] += 1
            state.miss_reason = REFUSED
        elif wait.fetch.result is not None:
            self.counters["lost_by_another_rank"] += 1
            state.miss_reason = FAILED
        state.cancel_kv_wait()
        return True


__all__ = ["FAILED", "LOST", "REFUSED", "TierPrefetch"]

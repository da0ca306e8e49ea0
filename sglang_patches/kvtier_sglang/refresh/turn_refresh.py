"""The refresh of a server's turns: what the cache and the attention backend call.

    cache        ask ... is_ready ... (admitted)
    attention    begin_prefill, layer, end_pass        entries chosen again when a turn begins
                 begin_decode, record                  and, where there is a trigger, during it

Scheduler thread only (the forward pass runs in it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from kvtier.retention.refreshing import RefreshRule
from kvtier.tier.prefetch import HostSpans
from kvtier_sglang.refresh.prefetch import RefreshPrefetch
from kvtier_sglang.refresh.refresher import Refresher
from kvtier_sglang.refresh.sources import FetchedSource, RefreshSource
from kvtier_sglang.refresh.state import CompactedContext, Contexts, Refreshing, RefreshState
from kvtier_sglang.refresh.trigger import RefreshTrigger, TriggerRule
from kvtier_sglang.tier.connector import TierConnector


class TurnRefresh:
    """See the module docstring. trigger: when entries are chosen again in a turn; None: never."""

    def __init__(
        self,
        refresher: Refresher,
        prefetch: RefreshPrefetch,
        trigger: RefreshTrigger | None = None,
    ) -> None:
        self.refresher = refresher
        self.prefetch = prefetch
        self.trigger = trigger

    # -- from the cache --

    def ask(self, state: RefreshState, context: CompactedContext, patience_s: float) -> None:
        """A request arrived whose prefix is compressed: fetch what its refresh needs."""
        self.prefetch.ask(state, context, patience_s)

    def is_ready(self, state: RefreshState, prompt_tokens: int) -> bool:
        """Return whether what a refresh needs arrived, will not arrive, or is not waited for."""
        wait = state.refresh_wait
        if wait is None:
            return True
        if wait.arrived is None:
            return False
        state.refresh_wait = None
        self._offer(state, wait.context, self.prefetch.pop_result(wait), prompt_tokens)
        return True

    def offer_restored(
        self, state: RefreshState, context: CompactedContext, host: HostSpans, prompt_tokens: int
    ) -> None:
        """A context was restored from `host`, which the refresh owns from now on."""
        prefetch = self.prefetch
        source = FetchedSource(host, context.ranges, prefetch.rule, prefetch.layouts)
        self._offer(state, context, source, prompt_tokens)

    def _offer(
        self,
        state: RefreshState,
        context: CompactedContext,
        source: RefreshSource | None,
        prompt_tokens: int,
    ) -> None:
        """The request will be admitted; without a source it may be refreshed later."""
        if source is None and self.trigger is None:
            return
        state.end_refresh()
        state.refreshing = Refreshing(self.refresher.contexts, context, source, prompt_tokens)

    def report(self) -> dict[str, Any]:
        """Return the seconds and the counters of refreshes for the server's internal state."""
        return {
            "refresh_s": self.refresher.refresh_s,
            "refresh_wait_s": self.prefetch.wait_s,
            **self.prefetch.counters,
            **self.refresher.counters,
        }

    # -- from the attention backend --

    @property
    def watches_decoding(self) -> bool:
        return self.trigger is not None

    def begin_prefill(
        self,
        rids: list[str],
        requests: list[int],
        stops: list[int],
        q_indptr: tuple[int, ...],
        rows: torch.Tensor,
    ) -> None:
        """See Refresher.begin_pass."""
        self.refresher.begin_pass(rids, requests, stops, q_indptr, rows)

    def layer(self, index: int, q: torch.Tensor, scale: float) -> None:
        """See Refresher.layer."""
        for refreshing, window in self.refresher.layer(index, q, scale):
            if self.trigger is not None:
                self.trigger.began(refreshing, index, window)

    def end_pass(self) -> None:
        self.refresher.end_pass()

    def begin_decode(self, rids: list[str], requests: list[int], rows: torch.Tensor) -> None:
        """See RefreshTrigger.begin_pass."""
        if self.trigger is not None:
            self.trigger.begin_pass(rids, requests, rows)

    def record(self, index: int, q: torch.Tensor) -> None:
        """See RefreshTrigger.record."""
        if self.trigger is not None:
            self.trigger.record(index, q)


MakeRefresh: TypeAlias = Callable[[TierConnector, Contexts], TurnRefresh]
"""Makes the refresh of the contexts that a cache keeps, from a tier."""


def make_turn_refresh(
    rule: RefreshRule | None,
    *,
    make_refresher: Callable[[RefreshRule, Contexts], Refresher],
    near_data: bool = False,
    trigger: TriggerRule | None = None,
) -> MakeRefresh | None:
    """Return a function that makes the refresh of a cache's contexts by a rule; None where there is
    none.

    make_refresher: of the entries as they are kept. near_data: whether the tier chooses where it
    can, which it cannot where heads compete. trigger: when entries are chosen again while a turn is
    generated, None: not at all.
    """
    if rule is None:
        return None

    def make(tier: TierConnector, contexts: Contexts) -> TurnRefresh:
        refresher = make_refresher(rule, contexts)
        prefetch = RefreshPrefetch(
            tier.link, lambda: tier.names, tier.layouts, rule, near_data=near_data
        )
        again = None if trigger is None else RefreshTrigger(refresher, prefetch, trigger)
        return TurnRefresh(refresher, prefetch, again)

    return make


__all__ = ["MakeRefresh", "TurnRefresh", "make_turn_refresh"]

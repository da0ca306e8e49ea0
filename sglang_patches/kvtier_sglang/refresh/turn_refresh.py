"""The refresh of a server's turns, and the parts of it that others call.

    cache        prefetch.ask ... is_ready ... (admitted)
    attention    refresher.begin_pass, layer, refresher.end_pass    when a turn begins
                 trigger.begin_pass, trigger.record                 during it, where there is one

Scheduler thread only (the forward pass runs in it).
"""

from __future__ import annotations

from typing import Any

import torch

from kvtier.config.sections import RefreshSettings
from kvtier.tier.prefetch import HostSpans
from kvtier_sglang.refresh.prefetch import RefreshPrefetch
from kvtier_sglang.refresh.refresher import Refresher
from kvtier_sglang.refresh.sources import FetchedSource, RefreshSource
from kvtier_sglang.refresh.state import CompactedContext, Refreshing, RefreshState
from kvtier_sglang.refresh.trigger import RefreshTrigger
from kvtier_sglang.tier.connector import TierConnector


class TurnRefresh:
    """See the module docstring. settings: say when entries are chosen again in a turn, and whether
    the tier chooses where it can, which it cannot where heads compete."""

    def __init__(
        self, refresher: Refresher, tier: TierConnector, settings: RefreshSettings
    ) -> None:
        self.refresher = refresher
        self.prefetch = RefreshPrefetch(
            tier.link,
            lambda: tier.names,
            tier.layouts,
            refresher.rule,
            near_data=settings.by == "near-data",
        )
        self.trigger: RefreshTrigger | None = None
        if settings.while_generating:
            self.trigger = RefreshTrigger(refresher, self.prefetch, settings)

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

    def layer(self, index: int, q: torch.Tensor, scale: float) -> None:
        """See Refresher.layer."""
        for refreshing, window in self.refresher.layer(index, q, scale):
            if self.trigger is not None:
                self.trigger.began(refreshing, index, window)

    def report(self) -> dict[str, Any]:
        """Return the seconds and the counters of refreshes for the server's internal state."""
        return {
            "refresh_s": self.refresher.refresh_s,
            "refresh_wait_s": self.prefetch.wait_s,
            **self.prefetch.counters,
            **self.refresher.counters,
        }

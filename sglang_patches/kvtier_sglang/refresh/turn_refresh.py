"""The refresh of a server's turns, and the parts of it that others call.

    cache        prefetch.ask ... is_ready ... (admitted)
    attention    refresher.begin_pass, refresher.layer, refresher.end_pass

Scheduler thread only (the forward pass runs in it).
"""

from __future__ import annotations

from typing import Any

from kvtier.config.sections import RefreshSettings
from kvtier.tier.prefetch import HostSpans
from kvtier_sglang.refresh.prefetch import RefreshPrefetch
from kvtier_sglang.refresh.refresher import Refresher
from kvtier_sglang.refresh.sources import FetchedSource, RefreshSource
from kvtier_sglang.refresh.state import CompactedContext, Refreshing, RefreshState
from kvtier_sglang.tier.connector import TierConnector


class TurnRefresh:
    """See the module docstring. settings: say whether the tier chooses where it can, which it
    cannot where heads compete."""

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

    def is_ready(self, state: RefreshState, prompt_tokens: int) -> bool:
        """Return whether what a refresh needs arrived, will not arrive, or is not waited for."""
        wait = state.refresh_wait
        if wait is None:
            return True
        if wait.arrived is None:
            return False
        state.refresh_wait = None
        source = self.prefetch.pop_result(wait)
        if source is not None:
            self._offer(state, wait.context, source, prompt_tokens)
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
        source: RefreshSource,
        prompt_tokens: int,
    ) -> None:
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

"""The refresh of a server's turns, and when its parts are called.

    ask          a request arrived: in the background exact KV comes. The request waits in the
                 queue until that is there, or computing would have been faster
    is_ready     it will be admitted: its refresh owns what arrived
    refresher    begin_pass, layer and end_pass in the pass that ends its prompt

Scheduler thread only (the forward pass runs in it); the tier is asked in the link's.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

from kvtier.tier.blobs.names import SpanName
from kvtier.tier.client import TierClient
from kvtier.tier.prefetch import HostSpans, fetch_spans
from kvtier_sglang.refresh.exact_kv import ExactKv
from kvtier_sglang.refresh.refresher import Refresher
from kvtier_sglang.refresh.state import CompactedContext, Refreshing, RefreshState, RefreshWait
from kvtier_sglang.tier.connector import TierConnector


class TurnRefresh:
    """See the module docstring. wait_s: that requests have waited for what arrived, together."""

    def __init__(self, refresher: Refresher, tier: TierConnector) -> None:
        self.refresher, self.tier = refresher, tier
        self.wait_s = 0.0

    def ask(self, state: RefreshState, context: CompactedContext, patience_s: float) -> None:
        """Ask for the exact KV of a context. patience_s: how long computing it takes."""
        state.cancel_refresh_wait()
        deadline = time.monotonic() + patience_s
        link, names, layouts = self.tier.link, self.tier.names, self.tier.layouts

        @cache
        def spans() -> list[SpanName]:
            return context.spans(names) or []

        def work(client: TierClient) -> HostSpans | None:
            host = fetch_spans(client, link, spans(), layouts)
            if host is not None and len(host.spans) < len(spans()):
                host.release()
                return None
            return host

        fetch = link.submit(work, needs=lambda: [span.key for span in spans()])
        state.refresh_wait = RefreshWait(fetch, deadline, context)

    def is_ready(self, state: RefreshState, prompt_tokens: int) -> bool:
        """Return whether the exact KV arrived, will not arrive, or is not waited for."""
        wait = state.refresh_wait
        if wait is None:
            return True
        if wait.arrived is None:
            return False
        state.refresh_wait = None
        host = wait.result
        if host is None:
            wait.cancel()
            self.refresher.counters["refresh_missed"] += 1
        else:
            self.wait_s += time.monotonic() - wait.asked_s
            self.offer(state, wait.context, host, prompt_tokens)
        return True

    def offer(
        self, state: RefreshState, context: CompactedContext, host: HostSpans, prompt_tokens: int
    ) -> None:
        """Let a request be refreshed, which will be admitted, from a context's exact KV. The
        refresh owns `host` from now on."""
        state.end_refresh()
        exact = ExactKv(host, self.tier.layouts)
        state.refreshing = Refreshing(self.refresher.contexts, context, exact, prompt_tokens)

    def report(self) -> dict[str, Any]:
        """Return the seconds and the counters of refreshes for the server's internal state."""
        return {
            "refresh_s": self.refresher.refresh_s,
            "refresh_wait_s": self.wait_s,
            **self.refresher.counters,
        }

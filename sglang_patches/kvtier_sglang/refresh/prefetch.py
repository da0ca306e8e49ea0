"""Requests that wait for what their refresh needs from the tier.

    ask           the request arrived: in the background exact KV comes, or the tier gets it ready;
                  it waits in the queue until that is there, or computing would have been faster
    pop_result    it will be admitted: what arrived, for its refresh

Scheduler thread only; the tier is asked in the link's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import cache

from kvtier.retention.refreshing import PrunedRange, RefreshRule
from kvtier.tier.blobs.names import ContextNames, SpanName
from kvtier.tier.client import TierClient
from kvtier.tier.link.link import TierLink
from kvtier.tier.link.queues import Fetch
from kvtier.tier.near_data.messages import Context
from kvtier.tier.near_data.session import NearData
from kvtier.tier.prefetch import Layouts, fetch_spans
from kvtier_sglang.refresh.sources import FetchedSource, NearSource, RefreshSource
from kvtier_sglang.refresh.state import CompactedContext, RefreshState, RefreshWait


class RefreshPrefetch:
    """See the module docstring.

    names:     of this server's KV, as the model is loaded now.
    near_data: let the tier choose where it can, instead of fetching the exact KV.
    wait_s:    that requests have waited for what arrived, together.
    """

    def __init__(
        self,
        link: TierLink,
        names: Callable[[], ContextNames],
        layouts: Layouts,
        rule: RefreshRule,
        *,
        near_data: bool = False,
    ) -> None:
        self.link, self.names, self.layouts = link, names, layouts
        self.rule, self.near_data = rule, near_data
        self.counters: Counter[str] = Counter()
        self.wait_s = 0.0

    def ask(self, state: RefreshState, context: CompactedContext, patience_s: float) -> None:
        """Ask for what a refresh of the context needs. patience_s: how long computing it takes."""
        state.cancel_refresh_wait()
        deadline = time.monotonic() + patience_s
        state.refresh_wait = RefreshWait(self._fetch(context), deadline, context)

    def _fetch(self, context: CompactedContext) -> Fetch[RefreshSource | None]:
        names = self.names()

        @cache
        def spans() -> list[SpanName]:
            return context.spans(names) or []

        def work(client: TierClient) -> RefreshSource | None:
            if not spans():
                return None
            if self.near_data and client.refreshes:
                return self._near(client, spans(), context.ranges)
            return self._fetched(client, spans(), context.ranges)

        return self.link.submit(work, needs=lambda: [span.key for span in spans()])

    def _near(
        self, client: TierClient, spans: list[SpanName], ranges: list[PrunedRange]
    ) -> RefreshSource | None:
        num_bytes = sum(self.layouts.of(span).num_bytes for span in spans)
        wanted = Context(spans, ranges, self.rule)
        session = NearData.open(client, wanted, client.deadline(num_bytes))
        if session is None:
            return None
        return NearSource(session, self.layouts.whole.dtype, self.link)

    def _fetched(
        self, client: TierClient, spans: list[SpanName], ranges: list[PrunedRange]
    ) -> RefreshSource | None:
        host = fetch_spans(client, self.link, spans, self.layouts)
        if host is not None and len(host.spans) < len(spans):
            host.release()
            host = None
        if host is None:
            return None
        return FetchedSource(host, ranges, self.rule, self.layouts)

    def pop_result(self, wait: RefreshWait) -> RefreshSource | None:
        """Return what arrived of a wait that is over; the caller owns it."""
        source = wait.result
        if source is None:
            wait.cancel()
            self.counters["refresh_missed"] += 1
        else:
            self.wait_s += time.monotonic() - wait.asked_s
        return source

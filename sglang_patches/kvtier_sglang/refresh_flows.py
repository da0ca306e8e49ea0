"""Requests that wait for what their refresh needs from the tier.

    ask        the request arrived: in the background exact KV comes, or the tier gets it ready
    settled    it waits in the queue until that is there, or until computing would have been faster
    take       it will be admitted: its refresh, to be handed to the refresher
    forget     it ended, in whatever way

Scheduler thread only; the tier is asked in the link's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.errors import TierError
from kvtier.retention.refreshing import Hole, RefreshRule
from kvtier.tier.client import TierClient
from kvtier.tier.host import Layouts, fetch_spans
from kvtier.tier.link import Fetch, TierLink
from kvtier.tier.names import ContextNames, SpanName, spans_of_ranges
from kvtier.tier.near_data import NearData
from kvtier.tier.refreshing import Context
from kvtier_sglang.refresh_sources import FetchedSource, NearSource, RefreshSource

# The longest that a forward pass waits for the tier to choose a context's entries, in all layers.
LONGEST_PASS_S = 5.0


@dataclass(frozen=True)
class CompactedContext:
    """What a request's refresh is of.

    token_ids:  of the context, at least as far as its last hole's last span
    exact_stop: up to which token it was computed with nothing dropped
    """

    token_ids: Sequence[int]
    holes: list[Hole]
    exact_stop: int
    extra_key: str

    def spans(self, names: ContextNames) -> list[SpanName] | None:
        """The spans that the holes are in; None where some of them are not whole."""
        ranges = [(hole.begin, hole.end) for hole in self.holes]
        chains = names.chains(self.extra_key, self.token_ids)
        return spans_of_ranges(chains, ranges, self.exact_stop)


@dataclass
class RefreshFlow:
    """One request's wait. asked, deadline: time.monotonic()."""

    fetch: Fetch[RefreshSource | None]
    holes: list[Hole]
    asked: float
    deadline: float


class RefreshFlows:
    """See the module docstring.

    near_data: let the tier choose where it can, instead of fetching the exact KV.
    wait_s:    that requests have waited, together.
    """

    def __init__(
        self,
        link: TierLink,
        names: ContextNames,
        layouts: Layouts,
        rule: RefreshRule,
        *,
        near_data: bool = False,
    ) -> None:
        self.link, self.names, self.layouts = link, names, layouts
        self.rule, self.near_data = rule, near_data
        self.counters: Counter[str] = Counter()
        self.wait_s = 0.0
        self._flows: dict[str, RefreshFlow] = {}

    def __bool__(self) -> bool:
        return bool(self._flows)

    def ask(self, rid: str, context: CompactedContext, patience_s: float) -> None:
        """Ask for what a refresh of the context needs. patience_s: how long computing it takes."""
        self.forget(rid)
        now = time.monotonic()
        fetch = self.link.submit(self._work(context, patience_s))
        self._flows[rid] = RefreshFlow(fetch, context.holes, now, now + patience_s)

    def _work(
        self, context: CompactedContext, patience_s: float
    ) -> Callable[[TierClient], RefreshSource | None]:
        def work(client: TierClient) -> RefreshSource | None:
            spans = context.spans(self.names)
            if not spans:
                return None
            if self.near_data and client.refreshes:
                return self._near(client, spans, context.holes, patience_s)
            return self._fetched(client, spans, context.holes)

        return work

    def _near(
        self, client: TierClient, spans: list[SpanName], holes: list[Hole], patience_s: float
    ) -> RefreshSource | None:
        num_bytes = sum(self.layouts.of(span).num_bytes for span in spans)
        wanted = Context(spans, holes, self.rule)
        session = NearData.open(client, wanted, client.deadline(num_bytes))
        if session is None:
            return None
        patience_s = min(patience_s, LONGEST_PASS_S)
        return NearSource(session, self.layouts.whole.dtype, patience_s, self._failed)

    def _failed(self, error: TierError) -> None:
        self.counters["refresh_cut_short"] += 1
        self.link.failed_elsewhere("refresh", error)

    def _fetched(
        self, client: TierClient, spans: list[SpanName], holes: list[Hole]
    ) -> RefreshSource | None:
        host = fetch_spans(client, self.link, spans, self.layouts)
        if host is not None and len(host.spans) < len(spans):
            host.release()
            host = None
        if host is None:
            return None
        return FetchedSource(host, holes, self.rule, self.layouts)

    def settled(self, rid: str) -> bool:
        """Whether the request need not wait (any longer)."""
        flow = self._flows.get(rid)
        return flow is None or flow.fetch.done or time.monotonic() >= flow.deadline

    def take(self, rid: str) -> tuple[list[Hole], RefreshSource] | None:
        """What a settled request waited for, once; the caller owns it."""
        flow = self._flows.pop(rid, None)
        if flow is None:
            return None
        source = flow.fetch.result if flow.fetch.done else None
        if source is None:
            flow.fetch.cancel(_release)
            self.counters["refresh_missed"] += 1
            return None
        self.wait_s += time.monotonic() - flow.asked
        return flow.holes, source

    def forget(self, rid: str) -> None:
        flow = self._flows.pop(rid, None)
        if flow is not None:
            flow.fetch.cancel(_release)


def _release(source: RefreshSource | None) -> None:
    if source is not None:
        source.release()


__all__ = ["CompactedContext", "RefreshFlows"]

"""Requests that wait for what their refresh needs from the tier.

    ask           the request arrived: in the background exact KV comes, or the tier gets it ready;
                  it waits in the queue until that is there, or computing would have been faster
    pop_result    it will be admitted: what arrived, for its refresh

Later, while it generates, `choose_ahead` has all its layers' entries chosen in the background.

Scheduler thread only; the tier is asked in the link's, and what is chosen ahead in one more, so
that no request that waits for KV waits for that.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from kvtier.retention.keepkv import QueryWindow
from kvtier.retention.refreshing import PrunedRange, RefreshRule
from kvtier.tier.blobs.names import ContextNames, SpanName
from kvtier.tier.client import TierClient
from kvtier.tier.link.link import TierLink
from kvtier.tier.link.queues import Fetch
from kvtier.tier.near_data.messages import Context
from kvtier.tier.near_data.session import NearData
from kvtier.tier.prefetch import Layouts, fetch_spans
from kvtier.tier.transport.connection import Deadline
from kvtier_sglang.refresh.sources import Choose, FetchedSource, NearSource, RefreshSource
from kvtier_sglang.refresh.state import (
    Ahead,
    Choices,
    CompactedContext,
    Refreshing,
    RefreshState,
    RefreshWait,
)
from kvtier_sglang.streams import Background

# The longest that all layers of a context are waited for where they are chosen in the background.
LONGEST_CHOICE_S = 10.0
# Contexts chosen ahead at a time: each takes host memory and the link's time from those who wait.
AHEAD_AT_A_TIME = 2

logger = logging.getLogger(__name__)


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
        self._ahead: set[Ahead] = set()
        self._chooser = ThreadPoolExecutor(1, thread_name_prefix="kvtier-refresh")

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

    @property
    def can_choose_ahead(self) -> bool:
        return len(self._ahead) < AHEAD_AT_A_TIME

    def choose_ahead(
        self, refreshing: Refreshing, windows: Mapping[int, QueryWindow], choose: Choose
    ) -> None:
        """Have the entries of all layers chosen in the background. windows: by layer, not empty."""
        device = next(iter(windows.values())).q.device
        fetch = self._fetch(refreshing.context)
        refreshing.ahead = Ahead(self._ahead, fetch, windows, choose, Background(device))
        self._ahead.add(refreshing.ahead)

    def chosen_ahead(self, refreshing: Refreshing) -> tuple[bool, Choices | None]:
        """Return whether the work of `choose_ahead` is over, and what came of it, once."""
        ahead = refreshing.ahead
        assert ahead is not None, "nothing is chosen ahead"
        if not ahead.fetch.done:
            return False, None
        if ahead.fetch.result is not None and ahead.choosing is None:
            source = ahead.fetch.result
            ahead.choosing = self._chooser.submit(_choose, source, ahead)
            return False, None
        if ahead.choosing is not None and not ahead.choosing.done():
            return False, None
        refreshing.ahead = None
        self._ahead.discard(ahead)
        choices = None if ahead.choosing is None else ahead.choosing.result()
        if choices is None:
            self.counters["refresh_missed"] += 1
            return True, None
        for chosen in choices.layers.values():
            for one in chosen:
                ahead.background.hand_over((one.k, one.v, one.log_votes))
        return True, choices


def _choose(source: RefreshSource, ahead: Ahead) -> Choices | None:
    """Runs in the chooser's thread."""
    layers = {}
    deadline = Deadline(LONGEST_CHOICE_S)
    try:
        with ahead.background.work():
            for layer, window in ahead.windows.items():
                chosen = ahead.choose(source, layer, window, deadline)
                if chosen is None:
                    return None
                layers[layer] = chosen
        return Choices(layers, source.moved_bytes)
    except Exception:
        # A bug of ours here must not end the scheduler: the request goes on without.
        logger.exception("a refresh failed unexpectedly")
        return None
    finally:
        source.release()

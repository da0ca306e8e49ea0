"""Requests that wait for what their refresh needs from the tier.

    ask        the request arrived: in the background exact KV comes, or the tier gets it ready
    settled    it waits in the queue until that is there, or until computing would have been faster
    take       it will be admitted: its refresh, to be handed to the refresher
    forget     it ended, in whatever way

Later, while it generates, `choose_ahead` has all its layers' entries chosen in the background.

Scheduler thread only; the tier is asked in the link's, and what is chosen ahead in one more, so
that no request that waits for KV waits for that.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from kvtier.retention.keepkv import QueryWindow
from kvtier.retention.refreshing import Chosen, PrunedRange, RefreshRule
from kvtier.tier.blobs.keys import Scope
from kvtier.tier.blobs.names import ContextNames, SpanName, spans_of_ranges
from kvtier.tier.client import TierClient
from kvtier.tier.link.link import TierLink
from kvtier.tier.link.queues import Fetch
from kvtier.tier.near_data.messages import Context
from kvtier.tier.near_data.session import NearData
from kvtier.tier.prefetch import Layouts, fetch_spans
from kvtier.tier.transport.connection import Deadline
from kvtier_sglang.ranks import Answer
from kvtier_sglang.refresh.sources import Choose, FetchedSource, NearSource, RefreshSource
from kvtier_sglang.streams import Background

# The longest that all layers of a context are waited for where they are chosen in the background.
LONGEST_CHOICE_S = 10.0
# Contexts chosen ahead at a time: each takes host memory and the link's time from those who wait.
AHEAD_AT_A_TIME = 2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompactedContext:
    """The context that a request's refresh is of.

    token_ids:  of the context, at least as far as its last pruned range's last span
    exact_stop: up to which token it was computed with nothing dropped
    """

    token_ids: Sequence[int]
    ranges: list[PrunedRange]
    exact_stop: int
    scope: Scope

    def spans(self, names: ContextNames) -> list[SpanName] | None:
        """The spans that the pruned ranges are in; None where some of them are not whole."""
        ranges = [(pruned.begin, pruned.end) for pruned in self.ranges]
        chains = names.chains(self.scope, self.token_ids)
        return spans_of_ranges(chains, ranges, self.exact_stop)


@dataclass
class PendingRefresh:
    """One request's wait. asked, deadline: time.monotonic(); came: whether all ranks have their
    part, None until they have settled it."""

    fetch: Fetch[RefreshSource | None]
    context: CompactedContext
    asked: float
    deadline: float
    came: bool | None = None

    @property
    def answer(self) -> object:
        """See ranks.Awaited. All ranks ask for the same tokens of the same context."""
        if self.fetch.done:
            return Answer.LOST if self.fetch.result is None else "came"
        return Answer.LOST if time.monotonic() >= self.deadline else Answer.AWAITED

    def settle(self, *, came: bool) -> None:
        """See ranks.Awaited."""
        self.came = came


@dataclass(frozen=True)
class Choices:
    """Entries chosen in the background. layers: of each pruned range, by the pool's layer."""

    layers: dict[int, list[Chosen]]
    moved_bytes: int


@dataclass
class Ahead:
    """Entries being chosen in the background: first the source comes, then they are chosen."""

    fetch: Fetch[RefreshSource | None]
    windows: Mapping[int, QueryWindow]
    choose: Choose
    background: Background
    choosing: Future[Choices | None] | None = None

    def drop(self) -> None:
        """They are not wanted any more."""
        if self.choosing is None:
            self.fetch.cancel(_release)
        elif self.choosing.cancel():
            _release(self.fetch.result)


class RefreshPrefetch:
    """See the module docstring.

    names:     of this server's KV, as the model is loaded now.
    near_data: let the tier choose where it can, instead of fetching the exact KV.
    wait_s:    that requests have waited for what came, together.
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
        self._pending: dict[str, PendingRefresh] = {}
        self._ahead: dict[str, Ahead] = {}
        self._chooser = ThreadPoolExecutor(1, thread_name_prefix="kvtier-refresh")

    def __bool__(self) -> bool:
        return bool(self._pending)

    @property
    def open(self) -> list[PendingRefresh]:
        """The refreshes that are awaited, in the order in which they were asked for."""
        return [pending for pending in self._pending.values() if pending.came is None]

    def ask(self, rid: str, context: CompactedContext, patience_s: float) -> None:
        """Ask for what a refresh of the context needs. patience_s: how long computing it takes."""
        self.forget(rid)
        now = time.monotonic()
        self._pending[rid] = PendingRefresh(self._fetch(context), context, now, now + patience_s)

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

    def settled(self, rid: str) -> bool:
        """Return whether the request need not wait (any longer)."""
        pending = self._pending.get(rid)
        return pending is None or pending.came is not None

    def take(self, rid: str) -> tuple[CompactedContext, RefreshSource | None] | None:
        """Return what a settled request waited for, once, and what came, which the caller owns;
        None where it did not wait for anything."""
        pending = self._pending.pop(rid, None)
        if pending is None:
            return None
        source = pending.fetch.result if pending.came else None
        if source is None:
            pending.fetch.cancel(_release)
            self.counters["refresh_missed"] += 1
        else:
            self.wait_s += time.monotonic() - pending.asked
        return pending.context, source

    def forget(self, rid: str) -> None:
        pending = self._pending.pop(rid, None)
        if pending is not None:
            pending.fetch.cancel(_release)
        ahead = self._ahead.pop(rid, None)
        if ahead is not None:
            ahead.drop()

    def clear(self) -> None:
        for rid in list(self._pending):
            self.forget(rid)

    @property
    def can_choose_ahead(self) -> bool:
        return len(self._ahead) < AHEAD_AT_A_TIME

    def choose_ahead(
        self,
        rid: str,
        context: CompactedContext,
        windows: Mapping[int, QueryWindow],
        choose: Choose,
    ) -> None:
        """Have the entries of all layers chosen in the background. windows: by layer, not empty."""
        device = next(iter(windows.values())).q.device
        self._ahead[rid] = Ahead(self._fetch(context), windows, choose, Background(device))

    def chosen_ahead(self, rid: str) -> tuple[bool, Choices | None]:
        """Return whether the work of `choose_ahead` is over, and what came of it, once."""
        ahead = self._ahead[rid]
        if not ahead.fetch.done:
            return False, None
        if ahead.fetch.result is not None and ahead.choosing is None:
            source = ahead.fetch.result
            ahead.choosing = self._chooser.submit(_choose, source, ahead)
            return False, None
        if ahead.choosing is not None and not ahead.choosing.done():
            return False, None
        del self._ahead[rid]
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
        with ahead.background:
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


def _release(source: RefreshSource | None) -> None:
    if source is not None:
        source.release()


__all__ = ["Choices", "CompactedContext", "RefreshPrefetch"]

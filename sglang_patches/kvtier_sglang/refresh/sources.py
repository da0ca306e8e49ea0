"""The sources of a refresh's entries: exact KV that came back, or the tier that has it.

    fetch        the exact KV of the pruned ranges is in host memory; choosing is done here
    near-data    the exact KV stays in the tier, which is told the queries and sends the entries

Both choose by the same rule (kvtier.retention.refreshing), so the entries are the same. Each is one
context's, for one refresh:

    moved_bytes    from and to the tier, so far
    choose         what a layer's CA heads keep of each range; None where the tier fails, now and
                   later. deadline: how long the tier is waited for, by a caller that cannot go on
                   without an answer
    release        gives back what it holds; calling it again does nothing
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from kvtier.errors import TierError
from kvtier.retention.keepkv import QueryWindow
from kvtier.retention.refreshing import Chosen, PrunedRange, RefreshRule
from kvtier.tier.link.link import TierLink
from kvtier.tier.near_data.exact_kv import ExactSpan, choose_ranges, exact_kv
from kvtier.tier.near_data.session import NearData
from kvtier.tier.prefetch import HostSpans, Layouts
from kvtier.tier.transport.connection import Deadline


class FetchedSource:
    """Exact KV in host memory, which it owns."""

    def __init__(
        self, host: HostSpans, ranges: Sequence[PrunedRange], rule: RefreshRule, layouts: Layouts
    ) -> None:
        self._host, self._ranges, self._rule = host, ranges, rule
        self._spans = [
            ExactSpan(span.begin, span.stop, payload, layouts.of(span))
            for span, payload in zip(host.spans, host.payloads, strict=True)
        ]
        self.moved_bytes = host.host_bytes

    def choose(
        self, layer: int, heads: Sequence[int], window: QueryWindow, deadline: Deadline
    ) -> list[Chosen] | None:
        return choose_ranges(self._rule, self._spans, layer, heads, self._ranges, window)

    def exact(self, layer: int, heads: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each range's tokens, `[heads, tokens, dim]` on the host."""
        return [exact_kv(self._spans, layer, heads, pruned) for pruned in self._ranges]

    def release(self) -> None:
        self._spans = []
        self._host.release()


class NearSource:
    """A session with the tier, which it owns. link: told of the failure that ended it."""

    def __init__(self, session: NearData, dtype: str, link: TierLink) -> None:
        self._session, self._dtype, self._link = session, dtype, link
        self._is_over = False

    @property
    def moved_bytes(self) -> int:
        return self._session.moved_bytes

    def choose(
        self, layer: int, heads: Sequence[int], window: QueryWindow, deadline: Deadline
    ) -> list[Chosen] | None:
        if self._is_over or not self._link.healthy:
            return None
        try:
            return self._session.choose(layer, heads, window, self._dtype, deadline)
        except TierError as error:
            self._link.failed_elsewhere("refresh", error)
            self.release()
            return None

    def release(self) -> None:
        self._is_over = True
        self._session.close()


RefreshSource: TypeAlias = FetchedSource | NearSource

Choose: TypeAlias = Callable[[RefreshSource, int, QueryWindow, Deadline], list[Chosen] | None]
"""The choice of each pruned range's entries in one layer, for some queries; None where the source
fails."""

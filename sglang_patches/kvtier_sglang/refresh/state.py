"""A request as its refresh knows it: what it waits for, and what is chosen again for it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvtier.retention.refreshing import PrunedRange
from kvtier.tier.blobs.keys import Scope
from kvtier.tier.blobs.names import ContextNames, SpanName, spans_of_ranges
from kvtier.tier.prefetch import HostSpans
from kvtier_sglang.pool.allocator import BundleAllocator
from kvtier_sglang.refresh.exact_kv import ExactKv
from kvtier_sglang.waits import Wait


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
class RefreshWait(Wait[HostSpans]):
    """A request's wait for the exact KV of a context. asked_s: time.monotonic() when it began."""

    context: CompactedContext
    asked_s: float = field(default_factory=time.monotonic, init=False)

    def describe(self, result: HostSpans) -> object:
        # All ranks ask for the same tokens of the same context.
        return "arrived"

    def release(self, result: HostSpans) -> None:
        result.release()


class Contexts(Protocol):
    """The cache that keeps the contexts, as far as a refresh asks it."""

    @property
    def allocator(self) -> BundleAllocator:
        """Owns the slots that they are in."""

    @property
    def requests(self) -> Mapping[str, RefreshState]:
        """The states of the requests that wait or run, by id."""

    def pruned_ranges(self, rid: str) -> list[PrunedRange]:
        """The ranges that heads keep a part of, of the prefix a request was admitted with."""

    def make_room(self, num_slots: int) -> None:
        """Evict what is needed for so many slots of whole bundles, as far as that can be."""

    def hold_private(self, slots: int) -> None:
        """A running request got slots of its own; below zero: it gave them back."""


@dataclass
class Refreshing:
    """One request's refresh, from where the request can be admitted on.

    contexts:      the cache that the context is in.
    exact:         the context's exact KV, held until its entries are chosen.
    prompt_tokens: where the request's prompt ends; the pass that gets there refreshes.
    slots:         its own, of each pruned range, once it has begun.
    """

    contexts: Contexts
    context: CompactedContext
    exact: ExactKv
    prompt_tokens: int
    slots: list[torch.Tensor] = field(default_factory=list)

    @property
    def ranges(self) -> list[PrunedRange]:
        return self.context.ranges

    def end(self) -> None:
        """Give back what it holds: its exact KV, and its own slots."""
        self.exact.host.release()
        for slots in self.slots:
            self.contexts.allocator.free(slots)
            self.contexts.hold_private(-slots.numel())


@dataclass
class RefreshState:
    """The refresh's part of a request's state.

    refresh_wait: its wait for exact KV; None: it waits for none.
    refreshing:   its refresh; None: it has none (yet, or any more).
    """

    refresh_wait: RefreshWait | None = None
    refreshing: Refreshing | None = None

    def cancel_refresh_wait(self) -> None:
        """Let nothing be fetched for a refresh any more."""
        wait, self.refresh_wait = self.refresh_wait, None
        if wait is not None:
            wait.cancel()

    def end_refresh(self) -> None:
        """End its refresh: the request goes on with what the tree has, or is gone."""
        refreshing, self.refreshing = self.refreshing, None
        if refreshing is not None:
            refreshing.end()

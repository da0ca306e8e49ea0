"""Refresh: the CA entries of a compacted context are chosen again, with the turn's own questions.

What a context kept when its turn ended was chosen without knowing what would be asked next. When a
new turn begins, its exact KV comes back from the tier while the request waits, and inside the pass
that ends the new prompt every layer derives its entries anew, from the exact KV and the queries it
has just computed, right before it attends:

    tree      | sink | kept by its scorer    | recent |        shared, never touched
    request   | sink | kept for this turn    | recent | new    entries of its own, freed at its end

The request's entries stand in slots of its own, as many as the tree's; its row points there. So no
other request sees them, a tier that does not answer in time leaves the request with what the tree
has, and the next turn starts from there again.

Scheduler thread only (the forward pass runs in it).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvtier.retention.keepkv import QueryWindow
from kvtier.retention.refreshing import Chosen, PrunedRange, RefreshRule
from kvtier.tier.transport.deadline import Deadline
from kvtier_kernels import HeadMap
from kvtier_kernels.fp8 import put, take
from kvtier_sglang.pool.allocator import HeadSplitAllocator
from kvtier_sglang.refresh.sources import RefreshSource

# The longest that a pass waits for the tier to choose entries, for all of its requests and layers:
# so long all requests of the engine wait.
LONGEST_PASS_S = 2.0


class Contexts(Protocol):
    """What a refresh asks of the cache that keeps the contexts."""

    @property
    def allocator(self) -> HeadSplitAllocator:
        """Owns the slots that they are in."""

    def pruned_ranges(self, rid: str) -> list[PrunedRange]:
        """The ranges that CA heads keep a part of, of the prefix a request was admitted with."""

    def make_room(self, num_tokens: int) -> None:
        """Evict what is needed for so many slots, as far as that can be."""

    def hold_private(self, slots: int) -> None:
        """A running request got slots of its own."""


@dataclass
class Refreshing:
    """One request's refresh. slots: private CA slots of each pruned range, once it has begun.

    source:        None where the tier had nothing in time; it may have when it is asked again
    prompt_tokens: where the request's prompt ends; the pass that gets there refreshes.
    """

    ranges: list[PrunedRange]
    source: RefreshSource | None
    prompt_tokens: int
    slots: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Active:
    """A refresh in the pass under way. rows: of its request in the pass's queries."""

    rid: str
    refreshing: Refreshing
    rows: slice


class Refresher:
    """See the module docstring.

    heads: per layer, those whose entries are chosen again; None: all CA heads.
    """

    def __init__(
        self, rule: RefreshRule, contexts: Contexts, heads: Sequence[HeadMap] | None = None
    ) -> None:
        self.contexts = contexts
        self.allocator = allocator = contexts.allocator
        self.pool = allocator.pool
        self.rule = rule
        self.heads = [buffers.head_map for buffers in self.pool.ca] if heads is None else heads
        self.counters: Counter[str] = Counter()
        self.refresh_s = 0.0
        self._waiting: dict[str, Refreshing] = {}
        self._active: list[Active] = []
        self._deadline = Deadline(LONGEST_PASS_S)

    # -- from the tree --

    def offer(self, rid: str, refreshing: Refreshing) -> None:
        """A request that will be admitted has what its refresh needs, or may get it later."""
        self.forget(rid)
        self._waiting[rid] = refreshing

    def forget(self, rid: str) -> int:
        """The request ended, in whatever way; returns how many slots of its own were freed."""
        refreshing = self._waiting.pop(rid, None)
        if refreshing is None:
            return 0
        if refreshing.source is not None:
            refreshing.source.release()
        freed = 0
        for slots in refreshing.slots:
            self.pool.forget_votes(slots)
            self.allocator.free(slots)
            freed += slots.numel()
        return freed

    # -- from the attention backend --

    def begin_pass(
        self,
        rids: list[str],
        requests: list[int],
        stops: list[int],
        q_indptr: tuple[int, ...],
        rows: torch.Tensor,
    ) -> list[str]:
        """A prefill pass begins: requests whose prompt it ends get entries of their own. Returns
        those that will not be refreshed after all.

        rows: the table of request rows; requests: their indices; stops: tokens after the pass.
        """
        self._active, given_up = [], []
        self._deadline = Deadline(LONGEST_PASS_S)
        for index, (rid, request, stop) in enumerate(zip(rids, requests, stops, strict=True)):
            refreshing = self._waiting.get(rid)
            if refreshing is None or refreshing.slots or stop < refreshing.prompt_tokens:
                continue
            if self.contexts.pruned_ranges(rid) != refreshing.ranges:
                # The context was evicted or is another variant since its KV was asked for.
                self.counters["refresh_outdated"] += 1
                self.forget(rid)
                given_up.append(rid)
                continue
            part = slice(q_indptr[index], q_indptr[index + 1])
            if refreshing.source is not None:
                if not self._begin(refreshing, rows[request]):
                    self.forget(rid)
                    given_up.append(rid)
                    continue
                self.counters["refreshed_turns"] += 1
            self._active.append(Active(rid, refreshing, part))
        return given_up

    @property
    def refreshed_in_pass(self) -> list[str]:
        """The requests whose entries the pass under way chooses again."""
        return [one.rid for one in self._active if one.refreshing.source is not None]

    def _begin(self, refreshing: Refreshing, row: torch.Tensor) -> bool:
        """Give a request entries of its own; False where there is no room for them."""
        if not self._allocate(refreshing, row):
            self.counters["refresh_no_room"] += 1
            return False
        self._point(refreshing, row)
        return True

    def write_all(
        self,
        refreshing: Refreshing,
        row: torch.Tensor,
        layers: Mapping[int, Sequence[Chosen]],
    ) -> bool:
        """Write what was chosen of every range, by layer, between two passes; whether that went."""
        if not refreshing.slots and not self._begin(refreshing, row):
            return False
        began = time.monotonic()
        for index, chosen in layers.items():
            for slots, one in zip(refreshing.slots, chosen, strict=True):
                self._write(index, slots, one)
        self.refresh_s += time.monotonic() - began
        return True

    def _allocate(self, refreshing: Refreshing, row: torch.Tensor) -> bool:
        needs = self._needs(refreshing, row)
        self.contexts.make_room(sum(needs))
        slots = self._slots(sum(needs))
        if slots is None:
            return False
        self.contexts.hold_private(sum(needs))
        refreshing.slots = list(torch.split(slots, needs))
        return True

    def _needs(self, refreshing: Refreshing, row: torch.Tensor) -> list[int]:
        """How many slots of its own each range of a request takes: one for each entry, and one for
        the entry of what is like none of them."""
        return [pruned.kept + 1 for pruned in refreshing.ranges]

    def _slots(self, count: int) -> torch.Tensor | None:
        """So many slots of a request's own."""
        return self.allocator.alloc(count)

    def _point(self, refreshing: Refreshing, row: torch.Tensor) -> None:
        """Let a request's row read its own entries, which begin as copies of the tree's."""
        for pruned, slots in zip(refreshing.ranges, refreshing.slots, strict=True):
            own, compensation = slots[: pruned.kept], slots[pruned.kept :]
            held = row[pruned.begin : pruned.begin + pruned.kept].to(torch.int64)
            for buffers in self.pool.ca:
                for side in buffers.sides:
                    side[own] = side[held]
                    side.index_fill_(0, compensation, 0)
            self._keep_compensation(int(held[0]), slots)
            row[pruned.begin : pruned.begin + pruned.kept] = own.to(row.dtype)
            if self.rule.merges:
                row[pruned.begin + pruned.kept] = compensation.to(row.dtype)
                self.pool.mask(compensation)

    def _keep_compensation(self, held: int, slots: torch.Tensor) -> None:
        """The locality heads' compensation entry is found through the range's first CA slot: the
        private one gets a copy of it. The others are CA entries only."""
        source = int(self.pool.locality_of[held])
        if source:
            target = int(self.pool.locality_of[slots[0]])
            for buffers in self.pool.locality:
                for side in buffers.sides:
                    side[target] = side[source]
            self.pool.log_votes[target] = self.pool.log_votes[source]
        self.allocator.free_locality(slots[1:] if source else slots)

    def layer(self, index: int, q: torch.Tensor, scale: float) -> list[tuple[str, QueryWindow]]:
        """Refresh the pool's `index`-th layer of the requests of this pass. Returns each request
        with the queries that it is refreshed for, now or later.

        q: `[tokens, KV heads, group, dim]`, all heads, rotated.
        """
        heads = self.heads[index]
        if not (heads.heads and self._active):
            return []
        windows = []
        began = time.monotonic()
        newest = self.rule.keepkv.window_queries
        for active in self._active:
            window = QueryWindow(heads.select(q[active.rows][-newest:]), scale)
            refreshing = active.refreshing
            windows.append((active.rid, window))
            if refreshing.source is None:
                continue
            if not self._refresh(index, refreshing, refreshing.source, window):
                # The layer goes on with copies of the tree's entries.
                self.counters["unrefreshed_layers"] += 1
        self.refresh_s += time.monotonic() - began
        return windows

    def _refresh(
        self, index: int, refreshing: Refreshing, source: RefreshSource, window: QueryWindow
    ) -> bool:
        """Choose a request's entries of one layer again; False where the source has failed."""
        chosen = source.choose(index, self.heads[index].heads, window, self._deadline)
        if chosen is None:
            return False
        for slots, one in zip(refreshing.slots, chosen, strict=True):
            self._write(index, slots, one)
        return True

    def own_keys(
        self, index: int, slots: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The keys of a request's own entries in one layer, `[heads, entries, dim]`, and their
        log-votes `[heads, group, entries]`, None where there are none."""
        every = torch.cat(list(slots))
        votes = self.pool.ca_votes
        keys = take(self.pool.ca[index].k, 0, every).transpose(0, 1)
        return keys, None if votes is None else votes[index][every].permute(1, 2, 0)

    def end_pass(self) -> None:
        """The pass is over: what was refreshed needs its source no more."""
        for active in self._active:
            source = active.refreshing.source
            if source is not None:
                self.counters["refresh_moved_bytes"] += source.moved_bytes
                source.release()
        self._active = []

    def _write(self, index: int, slots: torch.Tensor, chosen: Chosen) -> None:
        """Put what was chosen of a pruned range into its slots."""
        buffers, own = self.pool.ca[index], slots[: chosen.k.shape[1]]
        for target, source in ((buffers.k, chosen.k), (buffers.v, chosen.v)):
            put(target, own, source.transpose(0, 1).to(target.device))
        if chosen.log_votes is not None:
            votes = chosen.log_votes.to(self.pool.device)
            self.pool.set_votes(index, own, votes.permute(2, 0, 1))
        self.counters["merge_fallbacks"] += chosen.fallbacks


__all__ = ["Contexts", "Refresher", "Refreshing"]

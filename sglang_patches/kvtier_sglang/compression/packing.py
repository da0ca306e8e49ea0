"""Selection where heads keep different numbers of entries: of a span of tokens, each column (a
layer's head) keeps some, and they are packed into bundles of the span's own slots; pool/packed.py
says how. With pages of one entry:

    span of node   | a b c d e f g h |     head 0 keeps a b d f h, head 1 keeps c
    slots          | 4 5 6 7 . . . . |     3 slots for two heads: 6 entries
    column moved   head 0: a b d | f h     head 1: c           f and h have no place in their column
    packed         head 0: a b d           head 1: c f h       4, 5 and 6 stay, 7 … are free

How many each head keeps is chosen by kvtier.retention.head_budgets: the best entries of all heads
and layers (adaptive), or what a head profile says, in which a locality head keeps one entry, the
mean of all with as many votes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvtier.heads.profile import HeadProfile
from kvtier.heads.reference.rotation import KeyRotation
from kvtier.retention.head_budgets import adaptive_selection, profile_slots
from kvtier.retention.scorers import TokenScorer, select
from kvtier.retention.shares import whole_pages
from kvtier_kernels import HeadMap
from kvtier_kernels.fp8 import put, take
from kvtier_sglang.compression.selection import TokenSelection
from kvtier_sglang.pool.kv_pool import HeadSplitKVPool
from kvtier_sglang.pool.packed import PackedSpan, PackedSpans, bundles_first


class Kept(NamedTuple):
    """What is chosen of a span.

    entries: bool `[columns, tokens]`
    means:   columns that keep the mean of all tokens besides
    slots:   so many of the span's slots hold it, a multiple of PAGE
    """

    entries: torch.Tensor
    means: Sequence[int]
    slots: int


class PackedSelection(TokenSelection, ABC):
    """See the module docstring. Its pool packs."""

    @abstractmethod
    def choose(
        self, slots: torch.Tensor, first_position: int, keep: int, whole: int
    ) -> Kept | None:
        """What is kept of a span; None where it stays as it is. Arguments as of `compact`; whole:
        how many of the slots are in whole bundles."""

    def compact(
        self, slots: torch.Tensor, first_position: int, keep: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pack what is chosen of a span into whole bundles of its slots; else as the base's."""
        packed = self.pool.packed
        assert packed is not None, "a pool that does not pack"
        ordered, whole = bundles_first(slots)
        chosen = self.choose(slots, first_position, keep, whole)
        if chosen is None:
            return slots, slots[:0]
        means = [self._mean(column, slots) for column in chosen.means]
        held = chosen.entries.sum(-1)
        if means:
            held[list(chosen.means)] += 1
        counts = held.tolist()
        heads = [(b, head) for b in self.pool.ca for head in range(len(b.heads))]
        for (buffers, head), mine in zip(heads, chosen.entries, strict=True):
            those = slots[mine]
            for side in buffers.sides:
                column = side[:, head]
                # The right-hand side is a copy, so overlapping slots are no danger.
                column[ordered[: those.numel()]] = column[those]
        span = packed.span(ordered[: chosen.slots].clone(), counts)
        self._pack(packed, ordered, span)
        if means:
            cells = packed.vote(span, chosen.means, math.log(slots.numel()))
            for at, side in enumerate((packed.cells.k, packed.cells.v)):
                put(side[:, 0], cells, torch.stack([mean[at] for mean in means]))
        return span.slots, ordered[chosen.slots :]

    def _pack(self, packed: PackedSpans, ordered: torch.Tensor, span: PackedSpan) -> None:
        """Move what has no place in its column."""
        cells, keep = packed.cells, span.slots.numel()
        place = span.cells
        for column, (begin, count) in enumerate(zip(span.indptr, span.counts, strict=False)):
            if count > keep:
                source = cells.of(slice(column, column + 1), ordered[keep:count])[0]
                cells.move(source, place[begin + keep : begin + count])
        packed.add(span)

    def _mean(self, column: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 `[dim]` each: the mean key and value of a column's tokens."""
        buffers = self.pool.ca[column // self.pool.head_num]
        k, v = (
            take(side[:, column % self.pool.head_num], 0, slots).float().mean(0)
            for side in (buffers.k, buffers.v)
        )
        return k, v


class AdaptiveSelection(PackedSelection):
    """The best entries of all heads and layers stay. Its scorer is `comparable`."""

    def choose(
        self, slots: torch.Tensor, first_position: int, keep: int, whole: int
    ) -> Kept | None:
        """As many entries as come nearest to `keep` and as there are bundles for."""
        keep = min(whole_pages(keep, slots.numel()), whole)
        if keep in (0, slots.numel()):
            return None
        worth = torch.cat([
            self.scores(index, buffers, slots, first_position)
            for index, buffers in enumerate(self.pool.ca)
            if buffers.heads
        ])  # fmt: skip
        return Kept(adaptive_selection(worth, keep), (), keep)


class ProfileSelection(PackedSelection):
    """What a head profile says: anchored heads keep their best entries, all the same number, and
    the others one for all.

    profile:       of this rank's heads
    most_anchored: how many the rank has that has most: all ranks free the same slots
    compensation:  whether the other heads keep their mean, or nothing
    spare:         entries that anchored heads may want beside those they keep
    """

    def __init__(
        self,
        pool: HeadSplitKVPool,
        scorer: TokenScorer,
        rotations: Sequence[KeyRotation | None],
        *,
        profile: HeadProfile,
        most_anchored: int,
        compensation: bool,
        spare: int = 0,
    ) -> None:
        super().__init__(pool, scorer, rotations)
        self.profile, self._most_anchored, self._spare = profile, most_anchored, spare
        self.anchored_heads = [
            HeadMap(heads, torch.tensor(heads, dtype=torch.int64, device=pool.device))
            for heads in profile.ca_heads
        ]
        self._anchored = [
            index * pool.head_num + head
            for index, heads in enumerate(profile.ca_heads)
            for head in heads
        ]
        others = set(range(pool.layer_num * pool.head_num)) - set(self._anchored)
        self._means = sorted(others) if compensation else []

    def entries(self, stay: int, keep: int) -> int:
        """As the base's: here slots are no entries."""
        return keep

    def choose(
        self, slots: torch.Tensor, first_position: int, keep: int, whole: int
    ) -> Kept | None:
        """None where that takes as many slots as there are, or more than are in whole bundles."""
        tokens, heads = slots.numel(), self.pool.head_num
        keep = whole_pages(keep, tokens)
        columns = self.pool.layer_num * heads
        stay = profile_slots(keep + self._spare, self._most_anchored, columns)
        if stay >= tokens or stay > whole:
            return None
        entries = torch.zeros((columns, tokens), dtype=torch.bool, device=slots.device)
        if keep == tokens:
            entries[self._anchored] = True
            return Kept(entries, self._means, stay)
        for index, layer in enumerate(self.anchored_heads):
            if not layer.heads:
                continue
            scores = self.scores(index, self.pool.ca[index], slots, first_position)[layer.ids]
            mine = entries[index * heads : (index + 1) * heads]
            mine[layer.ids] = torch.zeros_like(mine[layer.ids]).scatter(
                1, select(scores, keep), value=True
            )
        return Kept(entries, self._means, stay)


__all__ = ["AdaptiveSelection", "PackedSelection", "ProfileSelection"]

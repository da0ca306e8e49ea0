"""Selection by adaptive budgets: the best entries of all CA heads and layers stay, and a head keeps
as many as are among them (kvtier.retention.head_budgets). They are packed into the span's first
slots; pool/packed.py says how.

    span of node   | a b c d e f g h |     head 0 keeps a b d f h, head 1 keeps c
    slots          | 4 5 6 7 . . . . |     3 slots for two heads: 6 entries
    column moved   head 0: a b d | f h     head 1: c           f and h have no place in their column
    packed         head 0: a b d           head 1: c f h       4, 5 and 6 stay, 7 … are free

An entry for what a head drops, its mean with as many votes, stands behind those that it keeps.
"""

from __future__ import annotations

import math

import torch

from kvtier.retention.head_budgets import adaptive_selection, is_compensated
from kvtier_sglang.compression.selection import TokenSelection
from kvtier_sglang.pool.kv_pool import ClassBuffers
from kvtier_sglang.pool.packed import PackedSpan, PackedSpans


class AdaptiveSelection(TokenSelection):
    """See the module docstring. Its pool packs, and its scorer is `comparable`."""

    # Whether heads get an entry for what they drop, where the share allows it.
    compensation = True

    def compact(self, slots: torch.Tensor, first_position: int, keep: int) -> None:
        """Pack the best entries of a span into its first `keep` slots, as many as all CA heads have
        there together; otherwise as the base's."""
        packed, tokens = self.pool.packed, slots.numel()
        assert packed is not None, "a pool that does not pack"
        worth = torch.cat([
            self.scores(index, buffers, slots, first_position)
            for index, buffers in enumerate(self.pool.ca)
            if buffers.heads
        ])  # fmt: skip
        compensation = self.compensation and is_compensated(keep, tokens)
        kept = adaptive_selection(worth, keep, compensation=compensation)
        own = kept.sum(-1).tolist()
        # A head that keeps all has nothing to compensate for.
        counts = [count + int(compensation and count < tokens) for count in own]
        heads = [(b, head) for b in self.pool.ca for head in range(len(b.heads))]
        for (buffers, head), mine, count in zip(heads, kept, counts, strict=True):
            _move_in_column(buffers, head, slots, mine, count)
        self._pack(packed, slots, PackedSpan(slots[:keep].clone(), tuple(counts)), own)

    def _pack(
        self, packed: PackedSpans, slots: torch.Tensor, span: PackedSpan, own: list[int]
    ) -> None:
        """Move what has no place in its column, and give compensation entries their votes."""
        cells, keep = packed.cells, span.slots.numel()
        place = span.cells(cells)
        cells.log_votes.index_fill_(0, place, 0.0)
        for column, (begin, count) in enumerate(zip(span.indptr, span.counts, strict=False)):
            if count > keep:
                source = cells.of(slice(column, column + 1), slots[keep:count])[0]
                cells.move(source, place[begin + keep : begin + count])
            if count > own[column]:
                cells.log_votes[place[begin + count - 1]] = math.log(slots.numel() - own[column])
        packed.add(span)


def _move_in_column(
    buffers: ClassBuffers, head: int, slots: torch.Tensor, kept: torch.Tensor, count: int
) -> None:
    """Move what a head keeps of a span to its first `count` slots: the tokens that are `kept`, bool
    `[slots]`, and where there is room for one more, the mean of the others."""
    chosen = slots[kept]
    for side in (buffers.k, buffers.v):
        column = side[:, head]
        entries = column[chosen]
        if count > chosen.numel():
            mean = column[slots[~kept]].float().mean(0, keepdim=True)
            entries = torch.cat([entries, mean.to(entries.dtype)])
        column[slots[:count]] = entries


__all__ = ["AdaptiveSelection"]

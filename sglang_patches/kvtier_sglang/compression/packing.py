"""Selection by adaptive budgets: the best entries of all CA heads and layers stay, and a head keeps
as many pages as are among them (kvtier.retention.head_budgets). They are packed into bundles of the
span's own slots; pool/packed.py says how. With pages of one entry:

    span of node   | a b c d e f g h |     head 0 keeps a b d f h, head 1 keeps c
    slots          | 4 5 6 7 . . . . |     3 slots for two heads: 6 entries
    column moved   head 0: a b d | f h     head 1: c           f and h have no place in their column
    packed         head 0: a b d           head 1: c f h       4, 5 and 6 stay, 7 … are free
"""

from __future__ import annotations

import torch

from kvtier.retention.head_budgets import adaptive_selection
from kvtier.retention.shares import whole_pages
from kvtier_sglang.compression.selection import TokenSelection
from kvtier_sglang.pool.packed import PackedSpan, PackedSpans, bundles_first


class AdaptiveSelection(TokenSelection):
    """See the module docstring. Its pool packs, and its scorer is `comparable`."""

    def compact(
        self, slots: torch.Tensor, first_position: int, keep: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pack the best entries of a span into whole bundles of its slots, as many as come nearest
        to `keep` and as there are; otherwise as the base's."""
        packed = self.pool.packed
        assert packed is not None, "a pool that does not pack"
        ordered, whole = bundles_first(slots)
        keep = min(whole_pages(keep, slots.numel()), whole)
        if keep in (0, slots.numel()):
            return slots, slots[:0]
        worth = torch.cat([
            self.scores(index, buffers, slots, first_position)
            for index, buffers in enumerate(self.pool.ca)
            if buffers.heads
        ])  # fmt: skip
        kept = adaptive_selection(worth, keep)
        counts = kept.sum(-1).tolist()
        heads = [(b, head) for b in self.pool.ca for head in range(len(b.heads))]
        for (buffers, head), mine, count in zip(heads, kept, counts, strict=True):
            chosen = slots[mine]
            for side in buffers.sides:
                column = side[:, head]
                # The right-hand side is a copy, so overlapping slots are no danger.
                column[ordered[:count]] = column[chosen]
        span = packed.span(ordered[:keep].clone(), counts)
        self._pack(packed, ordered, span)
        return span.slots, ordered[keep:]

    def _pack(self, packed: PackedSpans, ordered: torch.Tensor, span: PackedSpan) -> None:
        """Move what has no place in its column."""
        cells, keep = packed.cells, span.slots.numel()
        place = span.cells
        for column, (begin, count) in enumerate(zip(span.indptr, span.counts, strict=False)):
            if count > keep:
                source = cells.of(slice(column, column + 1), ordered[keep:count])[0]
                cells.move(source, place[begin + keep : begin + count])
        packed.add(span)


__all__ = ["AdaptiveSelection"]

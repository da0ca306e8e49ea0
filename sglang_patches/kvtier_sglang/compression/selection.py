"""Selection in a finished turn: every CA head keeps its own best tokens of the span.

What the token scorer wants to see was noted while the turn was prefilled, by slot, so it survives
chunking, batching, sharing and splits (`HeadSplitKVPool.state`). Here the scorer is asked, and the
selected entries move to the first slots of the span:

    span of node   | a b c d e f g h i j |     head 0 keeps b d i, head 1 keeps a e j
    slots          | 5 6 7 8 9 . . . . . |
    afterwards     | 5 6 7 0 0 0 0 0 0 0 |     slot 5: b for head 0, a for head 1; 8, 9 … are free

Here all heads keep the same number, so one slot table still serves them all; packing.py has heads
compete for entries instead. Entries carry their rotation with them: positions stay what they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvtier.heads.reference.rotation import KeyRotation
from kvtier.retention.scorers import Chunk, Span, TokenScorer, select
from kvtier_kernels.fp8 import restored, take
from kvtier_sglang.pool.kv_pool import ClassBuffers, HeadSplitKVPool


class TokenSelection:
    """Scores the tokens of one pool's CA heads and keeps the best. Owned by the scheduler thread.

    rotations: per layer, how its keys are rotated; None where they are not.
    """

    def __init__(
        self,
        pool: HeadSplitKVPool,
        scorer: TokenScorer,
        rotations: Sequence[KeyRotation | None],
    ) -> None:
        self.pool = pool
        self.scorer = scorer
        self.rotations = rotations

    def observe(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: PrefillRows,
        scale: float,
    ) -> None:
        """Remember what the scorer sees of a prefill's tokens in the pool's `index`-th layer.

        q `[tokens, KV heads, group, dim]`, k and v `[tokens, KV heads, dim]`, all heads.
        """
        buffers, state = self.pool.ca[index], self.pool.state
        if state is None or not buffers.heads or not self.scorer.state_width:
            return
        heads = buffers.select
        chunk = Chunk(heads(q), heads(k), heads(v), rows.indptr, rows.start, scale)
        state[index][:, rows.slots] = self.scorer.observe(chunk).flatten(0, 1)

    def compact(
        self, slots: torch.Tensor, first_position: int, keep: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Move each CA head's best `keep` entries of a span into so many of its slots. Returns
        those, and the others, which the caller frees.

        slots: [tokens] int64 in order of position, the first at `first_position`. No request may be
        reading them.
        """
        if keep >= slots.numel():
            return slots, slots[:0]
        for index, buffers in enumerate(self.pool.ca):
            if buffers.heads:
                selected = select(self.scores(index, buffers, slots, first_position), keep)
                _gather_in_place(buffers, slots, selected)
        return slots[:keep], slots[keep:]

    def entries(self, stay: int, keep: int) -> int:
        """How many entries of its span a CA head was meant to keep, where so many slots stayed."""
        return stay

    def scores(
        self, index: int, buffers: ClassBuffers, slots: torch.Tensor, first: int
    ) -> torch.Tensor:
        """Float32 `[heads, tokens]`, higher = keep, of one layer's CA heads; see `compact`."""
        assert self.pool.state is not None, "a selection over a pool that keeps everything"
        state = self.pool.state[index][:, slots]
        state = state.view(len(buffers.heads), self.scorer.state_width, slots.numel())
        keys = take(buffers.k.transpose(0, 1), 1, slots)
        values = None
        if self.scorer.comparable:
            values = take(buffers.v.transpose(0, 1), 1, slots)
        return self.score(index, keys, values, state, first)

    def score(
        self,
        index: int,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        state: torch.Tensor,
        first: int,
    ) -> torch.Tensor:
        """Float32 `[heads, tokens]` of exact KV of the pool's `index`-th layer, as it is stored;
        see Span."""
        rotary, rotation = self.rotations[index], None
        if rotary is not None:
            rotation = rotary.at(torch.arange(first, first + keys.shape[1], device=keys.device))
        layer, scales = self.pool.start_layer + index, self.pool.scales.of(index)
        keys = restored(keys, scales.k)
        values = None if values is None else restored(values, scales.v)
        return self.scorer.score(Span(keys, state, first, rotation, values, layer))


class PrefillRows(NamedTuple):
    """Which tokens an extend pass computes.

    indptr: row ranges of the requests; start: position of each request's first row.
    slots:  [tokens] int64, their CA slots.
    """

    indptr: tuple[int, ...]
    start: tuple[int, ...]
    slots: torch.Tensor


def _gather_in_place(buffers: ClassBuffers, slots: torch.Tensor, selected: torch.Tensor) -> None:
    source, target = slots[selected], slots[: selected.shape[1]]
    heads = torch.arange(len(buffers.heads), device=slots.device).unsqueeze(1)
    for side in buffers.sides:
        # The right-hand side is a copy, so overlapping slots are no danger.
        by_head = side.transpose(0, 1)
        by_head[heads, target] = by_head[heads, source]

"""What a forward pass asks of prefix memories: planned once, asked in every layer.

Each request's row remembers its memory on the device, so that decoding need not ask the host.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from kvtier_kernels import AttentionKernels, HeadMap
from kvtier_kernels.base import AttentionState
from kvtier_kernels.memory.base import project
from kvtier_kernels.scores import unrotate
from kvtier_sglang.memory.bank import NONE, MemoryBank


@dataclass
class MemoryPass:
    """One pass. ids, positions: of its tokens, int32 and int64.

    answered: of an extend pass, which rows are of which request, and how many of their lookups fell
    back, over all layers so far; None while decoding
    """

    bank: MemoryBank
    kernels: AttentionKernels
    ids: torch.Tensor
    positions: torch.Tensor
    answered: FallBacks | None = None
    # Of the last layer; most models rotate all of theirs alike.
    _rotated: tuple[Any, torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)

    def state(self, index: int, q: torch.Tensor, scale: float) -> AttentionState:
        """What the memories say to a layer's queries, `[tokens, KV heads, group, dim]`, rotated."""
        layer = self.bank.layers[index]
        if self.bank.looks_up[index]:
            x = self.bank.total(project(self._unrotated(index, q), layer.projection))
        else:
            x = q.new_zeros(len(q), *layer.projection.shape[:2], dtype=torch.float32)
        answer = self.kernels.memory.attend(q, x, self.positions, self.ids, layer, scale)
        if self.answered is not None:
            self.answered.add(answer.entry, self.bank.have_entries[index], self.ids)
        return answer.state

    def _unrotated(self, index: int, q: torch.Tensor) -> torch.Tensor:
        rotary = self.bank.rotary[index]
        if rotary is None:
            return q
        if self._rotated is None or self._rotated[0] is not rotary:
            cos, sin = rotary.cos_sin_cache[self.positions].to(q.device).chunk(2, dim=-1)
            self._rotated = (rotary, cos, sin)
        _, cos, sin = self._rotated
        flat = q.flatten(1, 2).transpose(0, 1)
        plain = unrotate(flat, cos, sin, interleaved=not rotary.is_neox_style)
        return plain.transpose(0, 1).view(q.shape)


@dataclass
class FallBacks:
    """How many lookups of each request of an extend pass fell back.

    rids, counts: the requests and their new tokens
    """

    rids: list[str]
    counts: list[int]
    _fell: torch.Tensor | None = field(default=None, repr=False)
    _asked: torch.Tensor | None = field(default=None, repr=False)

    def add(self, entry: torch.Tensor, have_entries: torch.Tensor, ids: torch.Tensor) -> None:
        """One layer's answers. have_entries: bool `[memories]`; where there are none there is
        nothing to fall back from."""
        asked = (ids >= 0) & have_entries[ids.clamp_min(0).long()]
        fell = asked & (entry < 0)
        self._asked = asked.int() if self._asked is None else self._asked + asked
        self._fell = fell.int() if self._fell is None else self._fell + fell

    def by_request(self) -> dict[str, tuple[int, int]]:
        """Lookups, and those that fell back. Waits for the device."""
        if self._fell is None or self._asked is None:
            return {}
        sides = [
            [int(part.sum()) for part in torch.split(side, self.counts)]
            for side in (self._asked.cpu(), self._fell.cpu())
        ]
        return {
            rid: (asked, fell) for rid, asked, fell in zip(self.rids, *sides, strict=True) if asked
        }


class MemoryPasses:
    """Plans the passes of one model runner. rows: how many request rows there are."""

    def __init__(self, bank: MemoryBank, kernels: AttentionKernels, rows: int) -> None:
        self.bank = bank
        self.kernels = kernels
        self._of_row: torch.Tensor | None = None
        self._rows = rows
        # Of the extend passes whose results have not been looked at, in their order.
        self._answered: deque[FallBacks] = deque()

    def extend(self, forward_batch: Any) -> MemoryPass | None:
        """None where no request has a memory. Every request's row is told, so that no row remembers
        a request that had it before."""
        if not len(self.bank) and self._of_row is None:
            return None
        indices = [self.bank.index_of(rid) for rid in forward_batch.rids]
        counts = [int(n) for n in forward_batch.extend_seq_lens_cpu]
        device = forward_batch.req_pool_indices.device
        ids = torch.tensor(indices, dtype=torch.int32).to(device, non_blocking=True)
        self._table(device)[forward_batch.req_pool_indices] = ids
        if all(index == NONE for index in indices):
            return None
        lengths = torch.tensor(counts).to(device, non_blocking=True)
        tokens = torch.repeat_interleave(ids, lengths, output_size=sum(counts))
        answered = FallBacks(list(forward_batch.rids), counts)
        self._answered.append(answered)
        return MemoryPass(self.bank, self.kernels, tokens, forward_batch.positions, answered)

    def decode(self, forward_batch: Any) -> MemoryPass | None:
        """None where no request has a memory."""
        rids = forward_batch.rids or ()
        if not len(self.bank) or all(self.bank.index_of(rid) == NONE for rid in rids):
            return None
        return self._decoding(forward_batch)

    def recorded(self, forward_batch: Any) -> MemoryPass:
        """A decoding pass that asks the device alone, as CUDA graphs want it."""
        self.bank.is_recorded = True
        return self._decoding(forward_batch)

    def _decoding(self, forward_batch: Any) -> MemoryPass:
        ids = self._table(forward_batch.req_pool_indices.device)[forward_batch.req_pool_indices]
        return MemoryPass(self.bank, self.kernels, ids, forward_batch.positions)

    def fell_back(self, rids: list[str]) -> dict[str, tuple[int, int]]:
        """Of an extend pass with these requests, whose result is there: lookups, and how many of
        them fell back, by request. A later pass may be under way."""
        while self._answered:
            first = self._answered.popleft()
            if first.rids == rids:
                return first.by_request()
            if rids not in [one.rids for one in self._answered]:
                # That pass asked no memory; this one is a later one.
                self._answered.appendleft(first)
                break
        return {}

    def _table(self, device: torch.device) -> torch.Tensor:
        if self._of_row is None:
            self._of_row = torch.full((self._rows,), NONE, dtype=torch.int32, device=device)
        return self._of_row


def merge_into(
    out: torch.Tensor,
    heads: HeadMap,
    state: AttentionState,
    memory: AttentionState,
    kernels: AttentionKernels,
    v_scale: float,
) -> None:
    """Store what some heads find in their entries and in memories. state: in units of values as
    stored, `v_scale` of which are one of the model's."""
    o = heads.select(memory.o)
    mine = AttentionState(o if v_scale == 1.0 else o / v_scale, heads.select(memory.lse))
    heads.place(out, kernels.merge_states(state, mine).o)


__all__ = ["FallBacks", "MemoryPass", "MemoryPasses", "merge_into"]

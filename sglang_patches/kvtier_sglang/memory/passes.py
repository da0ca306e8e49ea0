"""The questions of a forward pass to prefix memories: planned once, asked in every layer.

Each request's row remembers its memory on the device, so that decoding need not ask the host.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from kvtier_kernels import AttentionKernels
from kvtier_kernels.base import AttentionState
from kvtier_kernels.memory.base import project
from kvtier_kernels.scores import unrotate
from kvtier_sglang.memory.bank import NONE, MemoryBank
from kvtier_sglang.memory.lookups import Lookups, PassLookups


@dataclass
class MemoryPass:
    """One pass. ids, positions: of its tokens, int32 and int64.

    lookups: of an extend pass; None while decoding
    """

    bank: MemoryBank
    kernels: AttentionKernels
    ids: torch.Tensor
    positions: torch.Tensor
    lookups: PassLookups | None = None
    # The rotation of the last layer; most models rotate all of theirs alike.
    _rotated: tuple[Any, torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)

    def state(self, index: int, q: torch.Tensor, scale: float) -> AttentionState:
        """Return what the memories say to a layer's queries, `[tokens, KV heads, group, dim]`,
        rotated."""
        layer = self.bank.layers[index]
        looks_up = len(layer.keys) > 0
        if looks_up:
            x = self.bank.total(project(self._unrotated(index, q), layer.projection))
        else:
            x = q.new_zeros(len(q), *layer.projection.shape[:2], dtype=torch.float32)
        answer = self.kernels.memory.attend(q, x, self.positions, self.ids, layer, scale)
        if looks_up and self.lookups is not None:
            self.lookups.add(answer, self.ids, layer)
        return answer.state

    def _unrotated(self, index: int, q: torch.Tensor) -> torch.Tensor:
        rotary = self.bank.rotations[index]
        if rotary is None:
            return q
        if self._rotated is None or self._rotated[0] is not rotary:
            cos, sin = rotary.tables(self.positions)
            self._rotated = (rotary, cos, sin)
        _, cos, sin = self._rotated
        flat = q.flatten(1, 2).transpose(0, 1)
        plain = unrotate(flat, cos, sin, interleaved=rotary.interleaved)
        return plain.transpose(0, 1).view(q.shape)


class MemoryPasses:
    """Plans the passes of one model runner. rows: how many request rows there are."""

    def __init__(self, bank: MemoryBank, kernels: AttentionKernels, rows: int) -> None:
        self.bank = bank
        self.kernels = kernels
        self._of_row: torch.Tensor | None = None
        self._rows = rows
        # The lookups of extend passes whose results have not been looked at, in their order.
        self._under_way: deque[PassLookups] = deque()

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
        lookups = PassLookups(list(forward_batch.rids), counts)
        self._under_way.append(lookups)
        return MemoryPass(self.bank, self.kernels, tokens, forward_batch.positions, lookups)

    def decode(self, forward_batch: Any) -> MemoryPass | None:
        """None where no request has a memory."""
        rids = forward_batch.rids or ()
        if not len(self.bank) or all(self.bank.index_of(rid) == NONE for rid in rids):
            return None
        return self._decoding(forward_batch)

    def recorded(self, forward_batch: Any) -> MemoryPass | None:
        """A decoding pass that asks the device alone, as CUDA graphs want it; None where no memory
        is loaded, and none will be."""
        self.bank.is_recorded = True
        return self._decoding(forward_batch) if len(self.bank) else None

    def _decoding(self, forward_batch: Any) -> MemoryPass:
        ids = self._table(forward_batch.req_pool_indices.device)[forward_batch.req_pool_indices]
        return MemoryPass(self.bank, self.kernels, ids, forward_batch.positions)

    def lookups(self, rids: list[str]) -> dict[str, Lookups]:
        """Return the lookups of an extend pass with these requests, whose result is there, by
        request. A later pass may be under way."""
        while self._under_way:
            first = self._under_way.popleft()
            if first.rids == rids:
                return first.by_request()
            if rids not in [one.rids for one in self._under_way]:
                # That pass asked no memory; this one is a later one.
                self._under_way.appendleft(first)
                break
        return {}

    def _table(self, device: torch.device) -> torch.Tensor:
        if self._of_row is None:
            self._of_row = torch.full((self._rows,), NONE, dtype=torch.int32, device=device)
        return self._of_row


__all__ = ["MemoryPass", "MemoryPasses"]

"""The questions of a forward pass to prefix memories: planned once, asked in every layer.

Each request's row remembers its memory on the device, so that decoding need not ask the host.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from kvtier_kernels import AttentionKernels
from kvtier_kernels.base import AttentionState
from kvtier_kernels.memory.base import MemoryAnswer, MemoryLayer, project
from kvtier_kernels.scores import unrotate
from kvtier_sglang.memory.bank import NONE, MemoryBank


class Lookups(NamedTuple):
    """The lookups of one request's prompt, or of a part of it.

    asked:  how many there were, in all layers
    fell:   of those, that no entry was near enough to
    margin: the nearest entries' cosines less what is near enough, added up
    """

    asked: int = 0
    fell: int = 0
    margin: float = 0.0

    def plus(self, other: Lookups) -> Lookups:
        """Return the lookups of both parts."""
        return Lookups(self.asked + other.asked, self.fell + other.fell, self.margin + other.margin)


@dataclass
class PassLookups:
    """The lookups of an extend pass, over all layers so far, on the device.

    rids, counts: the requests and their new tokens
    """

    rids: list[str]
    counts: list[int]
    # Float32 [3, tokens]: as in Lookups.
    _sums: torch.Tensor | None = field(default=None, repr=False)

    def add(self, answer: MemoryAnswer, ids: torch.Tensor, layer: MemoryLayer) -> None:
        """One layer's answers to the tokens of these memories. A memory without entries there is
        not asked."""
        own = ids.clamp_min(0).long()
        asked = (ids >= 0) & (layer.key_indptr.diff() > 0)[own]
        fell = asked & (answer.entry < 0)
        margin = torch.where(asked, answer.cosine - layer.nearness[own], 0.0)
        sums = torch.stack([asked.float(), fell.float(), margin.float()])
        self._sums = sums if self._sums is None else self._sums + sums

    def by_request(self) -> dict[str, Lookups]:
        """Return the lookups of each request that made some. Waits for the device."""
        if self._sums is None:
            return {}
        parts = torch.split(self._sums.cpu().double(), self.counts, dim=1)
        found = {}
        for rid, part in zip(self.rids, parts, strict=True):
            asked, fell, margin = part.sum(1).tolist()
            if asked:
                found[rid] = Lookups(int(asked), int(fell), margin)
        return found


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

    def decode(self, forward_batch: Any, *, recorded: bool = False) -> MemoryPass | None:
        """None where no request has a memory. recorded: by a CUDA graph, which asks the device
        alone; then None where no memory is loaded, and none will be."""
        self.bank.is_recorded |= recorded
        if not len(self.bank):
            return None
        rids = forward_batch.rids or ()
        if not recorded and all(self.bank.index_of(rid) == NONE for rid in rids):
            return None
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

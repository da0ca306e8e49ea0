"""Attention over fixed prefixes in PyTorch, on any device: a memory and a KV head at a time."""

from __future__ import annotations

import torch

from kvtier_kernels.base import AttentionState
from kvtier_kernels.blocks import blocks
from kvtier_kernels.memory.base import MemoryAnswer, MemoryKernels, MemoryLayer, lookup_keys
from kvtier_kernels.states import empty_state


class ReferenceMemory(MemoryKernels):
    """See the module docstring. It asks tensors for values, so on a GPU it waits."""

    def attend(
        self,
        q: torch.Tensor,
        x: torch.Tensor,
        positions: torch.Tensor,
        ids: torch.Tensor,
        layer: MemoryLayer,
        scale: float,
    ) -> MemoryAnswer:
        state = empty_state(q)
        entry = torch.full_like(ids, -1, dtype=torch.int32)
        cosine = torch.full_like(ids, float("-inf"), dtype=torch.float32)
        for memory in sorted(set(ids.tolist()) - {-1}):
            rows = torch.nonzero(ids == memory).flatten()
            behind = positions[rows] - layer.prefix_tokens[memory]
            wanted = lookup_keys(x[rows, memory], behind, layer.place_weight[memory])
            entry[rows], cosine[rows] = _nearest(wanted, layer, memory)
            answered = rows[entry[rows] >= 0]
            for head in range(q.shape[1]):
                looks_up = bool(layer.looks_up[memory, head])
                over_kept = rows[entry[rows] < 0] if looks_up else rows
                o, lse = _attention(q[over_kept, head], *_kept(layer, memory, head), scale)
                state.o[over_kept, head], state.lse[over_kept, head] = o.to(q.dtype), lse
                if looks_up:
                    found = entry[answered].long()
                    state.o[answered, head] = layer.o[found, head].to(q.dtype)
                    state.lse[answered, head] = layer.lse[found, head]
        return MemoryAnswer(state, entry, cosine)


def _nearest(
    wanted: torch.Tensor, layer: MemoryLayer, memory: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entries of a memory that answer, int32, -1 for none, and the nearest ones'
    cosines.

    wanted: float32 [tokens, R + PLACE_WIDTH], of length 1
    """
    begin, end = (int(bound) for bound in layer.key_indptr[memory : memory + 2])
    if begin == end:
        cosine = torch.full_like(wanted[:, 0], float("-inf"))
        return torch.full_like(cosine, -1, dtype=torch.int32), cosine
    keys = layer.keys[begin:end].float()
    # This is not a matrix product, which may round the cosines of equal keys differently.
    parts = [
        (wanted[part].unsqueeze(1) * keys).sum(-1).max(-1)
        for part in blocks(len(wanted), keys.numel())
    ]
    cosine, nearest = (torch.cat(each) for each in zip(*parts, strict=True))
    near_enough = cosine >= layer.nearness[memory]
    return torch.where(near_enough, begin + nearest, -1).int(), cosine


def _kept(layer: MemoryLayer, memory: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entries that a memory kept for a KV head: k and v [kept, D]."""
    at = memory * layer.looks_up.shape[1] + head
    begin, end = (int(bound) for bound in layer.kept_indptr[at : at + 2])
    return layer.kept_k[begin:end], layer.kept_v[begin:end]


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> AttentionState:
    """q [rows, G, D] over all of k, v [kept, D] in float32: o [rows, G, D] and lse [rows, G]."""
    logits = q.float() @ k.float().T * scale
    lse = torch.logsumexp(logits, dim=-1)
    return AttentionState(torch.softmax(logits, dim=-1) @ v.float(), lse)

"""Attention over fixed prefixes by two kernels: one looks up, the other answers."""

from __future__ import annotations

import torch
import triton

from kvtier_kernels.base import AttentionState
from kvtier_kernels.memory.base import (
    PLACE_SPANS,
    PLACE_WIDTH,
    MemoryAnswer,
    MemoryKernels,
    MemoryLayer,
)
from kvtier_kernels.triton_backend.attention.tiles import kept_entries
from kvtier_kernels.triton_backend.launching import (
    Launch,
    dim_contiguous,
    is_ieee,
    launch,
    state_buffers,
)
from kvtier_kernels.triton_backend.memory.answer import answer_token
from kvtier_kernels.triton_backend.memory.lookup import nearest_entry

# Numbers of a tile of keys, 32 of a thread.
_TILE = 4096


class TritonMemory(MemoryKernels):
    """See the module docstring. Neither logits nor cosines are held. A layer's tensors should lie
    in one piece: what does not is copied by every call."""

    def __init__(self, launch: Launch = launch) -> None:
        self._launch = launch

    def attend(
        self,
        q: torch.Tensor,
        x: torch.Tensor,
        positions: torch.Tensor,
        ids: torch.Tensor,
        layer: MemoryLayer,
        scale: float,
    ) -> MemoryAnswer:
        ids = ids.contiguous()
        entry, cosine = self._look_up(x, positions, ids, layer)
        return MemoryAnswer(self._answer(q, ids, entry, layer, scale), entry, cosine)

    def _look_up(
        self, x: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor, layer: MemoryLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """entry and cosine of MemoryAnswer."""
        tokens, _, rank = x.shape
        x = dim_contiguous(x)
        entry = torch.empty(tokens, dtype=torch.int32, device=x.device)
        cosine = torch.empty(tokens, dtype=torch.float32, device=x.device)
        columns = triton.next_power_of_2(rank + PLACE_WIDTH)
        self._launch(
            nearest_entry,
            (tokens,),
            x,
            positions.contiguous(),
            ids,
            layer.keys.contiguous(),
            layer.key_indptr.contiguous(),
            layer.place_weight.contiguous(),
            layer.nearness.contiguous(),
            layer.prefix_tokens.contiguous(),
            entry,
            cosine,
            *x.stride()[:2],
            RANK=rank,
            WIDTH=rank + PLACE_WIDTH,
            SLOW=PLACE_SPANS[0],
            FAST=PLACE_SPANS[1],
            BLOCK_C=columns,
            BLOCK_E=max(16, _TILE // columns),
            num_warps=4,
        )
        return entry, cosine

    def _answer(
        self,
        q: torch.Tensor,
        ids: torch.Tensor,
        entry: torch.Tensor,
        layer: MemoryLayer,
        scale: float,
    ) -> AttentionState:
        tokens, heads, group, dim = q.shape
        q, k, v = (dim_contiguous(each) for each in (q, layer.kept_k, layer.kept_v))
        o, lse = state_buffers((tokens, heads, group, dim), q.device, q.dtype)
        ieee = is_ieee(q)
        self._launch(
            answer_token,
            (tokens, heads),
            q,
            ids,
            entry,
            layer.o.contiguous(),
            layer.lse.contiguous(),
            layer.looks_up.contiguous().view(torch.uint8),
            k,
            v,
            layer.kept_indptr.contiguous(),
            o,
            lse,
            scale,
            *q.stride()[:3],
            k.stride(0),
            v.stride(0),
            GROUP=group,
            DIM=dim,
            BLOCK_G=max(16, triton.next_power_of_2(group)),
            BLOCK_D=max(16, triton.next_power_of_2(dim)),
            BLOCK_N=kept_entries(ieee),
            IEEE=ieee,
            num_warps=4,
            num_stages=3,
        )
        return AttentionState(o, lse)

"""The backend `triton`: attention on a GPU, over lists replayable by CUDA graphs, and selection.

On a CPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1): for tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton

from kvtier_kernels.base import AttentionKernels, AttentionState, RaggedKV
from kvtier_kernels.triton_backend.attention import by_slots
from kvtier_kernels.triton_backend.attention.by_lists import TritonLists
from kvtier_kernels.triton_backend.attention.dense import CUDNN, DensePrefixes, has_cudnn_attention
from kvtier_kernels.triton_backend.attention.merge import merge_two
from kvtier_kernels.triton_backend.attention.store import store_entries
from kvtier_kernels.triton_backend.launching import (
    Launch,
    dim_contiguous,
    has_numbers_of,
    launch,
    state_buffers,
    to_device,
)
from kvtier_kernels.triton_backend.memory.attend import TritonMemory
from kvtier_kernels.triton_backend.planning.plans import TritonPlan
from kvtier_kernels.triton_backend.selecting import TritonSelection

MERGE_ROWS = 8
# Tokens of a program that stores new ones.
STORE_TOKENS = 16


class TritonKernels(AttentionKernels):
    """See the module docstring."""

    name = "triton"
    plans_on_device = True

    def __init__(self, launch: Launch = launch, dense: DensePrefixes | None = None) -> None:
        """dense: computes long prefixes on any device. None: cuDNN does, where it can."""
        self.selection = TritonSelection(launch)
        self.memory = TritonMemory(launch)
        self.lists = TritonLists(launch)
        self._launch = launch
        self._dense = dense

    def reads(self, dtype: torch.dtype) -> bool:
        return has_numbers_of(dtype)

    def plan(self, slots: torch.Tensor, indptr: Sequence[int]) -> TritonPlan:
        # Half as long, and half the registers of a tile's addresses.
        return TritonPlan(slots.int(), to_device(indptr, slots.device), tuple(indptr))

    def store(self, k: torch.Tensor, v: torch.Tensor, kv: RaggedKV, slots: torch.Tensor) -> None:
        k, v = dim_contiguous(k), dim_contiguous(v)
        tokens, heads, dim = k.shape
        self._launch(
            store_entries,
            (triton.cdiv(tokens, STORE_TOKENS), heads),
            k,
            v,
            kv.k,
            kv.v,
            slots,
            tokens,
            *k.stride()[:2],
            *v.stride()[:2],
            *kv.k.stride()[:2],
            *kv.v.stride()[:2],
            DIM=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            BLOCK_T=STORE_TOKENS,
        )

    def extend(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        q_indptr: Sequence[int],
        kv: RaggedKV,
        plan: TritonPlan,
        scale: float,
    ) -> AttentionState:
        dense = self._dense_for(q)
        division = None if dense is None else dense.divide(plan, q_indptr)
        if dense is None or division is None:
            return by_slots.extend(self._launch, q, k_new, v_new, q_indptr, kv, plan, scale)
        parts, rest = division
        if rest is None:
            state = AttentionState(*state_buffers(q.shape, q.device, q.dtype))
            dense.new_tokens(parts, q, k_new, v_new, scale, state)
        else:
            state = by_slots.extend(self._launch, q, k_new, v_new, q_indptr, kv, rest, scale)
        dense.add(parts, q, kv, scale, state)
        return state

    def extend_shapes(self, q: torch.Tensor, chunk: int, context: int) -> Iterator[tuple[int, int]]:
        yield 1, 1
        dense = self._dense_for(q)
        if dense is not None:
            yield from dense.shapes(chunk, context)

    def merge_states(self, a: AttentionState, b: AttentionState) -> AttentionState:
        dim = a.o.shape[-1]
        rows = a.lse.numel()
        o = torch.empty_like(a.o, memory_format=torch.contiguous_format)
        lse = torch.empty_like(a.lse, memory_format=torch.contiguous_format)
        self._launch(
            merge_two,
            (triton.cdiv(rows, MERGE_ROWS),),
            a.o.contiguous(),
            a.lse.contiguous(),
            b.o.contiguous(),
            b.lse.contiguous(),
            o,
            lse,
            rows,
            DIM=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            BLOCK_R=MERGE_ROWS,
        )
        return AttentionState(o, lse)

    def _dense_for(self, q: torch.Tensor) -> DensePrefixes | None:
        if self._dense is None and has_cudnn_attention(q):
            return CUDNN
        return self._dense

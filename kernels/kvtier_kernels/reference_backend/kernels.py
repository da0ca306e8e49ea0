"""The backend `reference`: plain PyTorch, any device, no padding, no copy of long runs; decoding in
float32 on a CPU is compiled by numba.

Its speed on a CPU matters (it serves the engine there), its clarity matters more: the other
backends are tested against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from kvtier_kernels.base import AttentionKernels, AttentionState, RaggedKV
from kvtier_kernels.reference_backend.lists import ReferenceLists
from kvtier_kernels.reference_backend.memory import ReferenceMemory
from kvtier_kernels.reference_backend.products import concat, flash, over_entries
from kvtier_kernels.reference_backend.selection import ReferenceSelection
from kvtier_kernels.reference_backend.slots import RequestSlots, plan_request
from kvtier_kernels.states import merge_states

Plan = tuple[RequestSlots, ...]


class ReferenceKernels(AttentionKernels):
    name = "reference"
    selection = ReferenceSelection()
    memory = ReferenceMemory()
    lists = ReferenceLists()

    def plan(self, slots: torch.Tensor, indptr: Sequence[int]) -> Plan:
        return tuple(plan_request(slots[begin:end]) for begin, end in pairwise(indptr))

    def extend(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        q_indptr: Sequence[int],
        kv: RaggedKV,
        plan: Plan,
        scale: float,
    ) -> AttentionState:
        states = []
        for request, (begin, end) in zip(plan, pairwise(q_indptr), strict=True):
            own = _causal(q[begin:end], k_new[begin:end], v_new[begin:end], scale)
            if request:
                own = merge_states(over_entries(q[begin:end], kv, request, scale), own)
            states.append(own)
        return concat(states)

    def merge_states(self, a: AttentionState, b: AttentionState) -> AttentionState:
        return merge_states(a, b)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> AttentionState:
    """New tokens over themselves: q [rows, heads, group, dim], k, v [rows, heads, dim]."""
    rows, heads, group, dim = q.shape
    # KV heads as the batch, the GQA group as heads: K and V are broadcast, not repeated.
    wide = (heads, group, rows, dim)
    k = k.transpose(0, 1).unsqueeze(1).expand(wide)
    v = v.transpose(0, 1).unsqueeze(1).expand(wide)
    o, lse = flash(q.permute(1, 2, 0, 3), k, v, scale, True, None)
    return AttentionState(o.permute(2, 0, 1, 3), lse.permute(2, 0, 1).float())

"""The backend `flashinfer`: its paged kernels over slots, with votes as a variant of attention.

A page is one entry, so a plan's slot table is the page table, and KV stays where the pool has it,
slot-major or head-major. A prefix is read by FlashInfer's tensor-core kernels, which take any GQA
group; extending attends over the new tokens apart and merges the two states. Lists in pages are
tables of cells (`lists.py`), read by the same kernels.

FlashInfer plans on the host; the layers of a step share that (`FlashInferPlan`). CUDA graphs cannot
record it.

The Triton kernels serve what FlashInfer does not: head dimensions other than 64, 128 and 256,
float32 queries, and K and V in layouts that differ (`limits.fits`). They also serve selection and
memories, of which FlashInfer has nothing, and merging of states, for which its kernel has no room
with many heads of dimension 256.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from kvtier_kernels.base import AttentionKernels, AttentionState, RaggedKV
from kvtier_kernels.flashinfer_backend.limits import aligned, fits
from kvtier_kernels.flashinfer_backend.lists import FlashInferLists
from kvtier_kernels.flashinfer_backend.variant import run_arguments
from kvtier_kernels.flashinfer_backend.wrappers import (
    Kind,
    Make,
    Wrapper,
    Wrappers,
    make_wrapper,
)
from kvtier_kernels.states import empty_state
from kvtier_kernels.triton_backend.kernels import TritonKernels
from kvtier_kernels.triton_backend.launching import to_device
from kvtier_kernels.triton_backend.planning.plans import TritonPlan


@dataclass(eq=False)
class FlashInferPlan:
    """A slot table, and FlashInfer's plans over it as layers ask for them.

    entries:  the table as the Triton kernels have it: int32 slots and indptr on the device, and
              its bounds on the host.
    wrappers: planned, by what they were planned for; lent until the plan is gone.
    empty:    the query rows of requests without entries on the device, by q_indptr.
    """

    entries: TritonPlan
    wrappers: dict[tuple[Any, ...], Wrapper] = field(default_factory=dict)
    empty: dict[tuple[int, ...], torch.Tensor | None] = field(default_factory=dict)


class FlashInferKernels(AttentionKernels):
    """See the module docstring. All calls of one instance belong to one stream."""

    name = "flashinfer"

    def __init__(self, make: Make = make_wrapper) -> None:
        self._triton = TritonKernels()
        self.selection = self._triton.selection
        self.memory = self._triton.memory
        self.lists = FlashInferLists(self.plan, self.over_entries, self._triton.lists)
        self._wrappers = Wrappers(make)

    def reads(self, dtype: torch.dtype) -> bool:
        return self._triton.reads(dtype)

    def plan(self, slots: torch.Tensor, indptr: Sequence[int]) -> FlashInferPlan:
        plan = FlashInferPlan(self._triton.plan(slots, indptr))
        weakref.finalize(plan, self._wrappers.give_back, plan.wrappers).atexit = False
        return plan

    def extend(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        q_indptr: Sequence[int],
        kv: RaggedKV,
        plan: FlashInferPlan,
        scale: float,
    ) -> AttentionState:
        if not fits(q, kv):
            return self._triton.extend(q, k_new, v_new, q_indptr, kv, plan.entries, scale)
        rows = tuple(q_indptr)
        own = self._over_new(q, k_new, v_new, rows, plan, scale)
        if plan.entries.bounds[-1] == 0:
            return own
        return self.merge_states(self.over_entries(q, rows, kv, plan, scale), own)

    def merge_states(self, a: AttentionState, b: AttentionState) -> AttentionState:
        return self._triton.merge_states(a, b)

    def over_entries(
        self,
        q: torch.Tensor,
        q_indptr: tuple[int, ...],
        kv: RaggedKV,
        plan: FlashInferPlan,
        scale: float,
        log_votes: torch.Tensor | None = None,
    ) -> AttentionState:
        """Every query over all entries of its request.

        log_votes: [slots], or [slots, query heads].
        """
        if plan.entries.bounds[-1] == 0:
            return empty_state(q)
        extra: tuple[Any, ...] = ()
        kind = Kind(paged=True)
        if log_votes is not None:
            kind = Kind(paged=True, votes=(q.dtype, kv.k.dtype, q.shape[-1]))
            extra = run_arguments(log_votes, plan.entries.slots, plan.entries.indptr, scale)
        wrapper = self._planned(plan, kind, q, kv.k, q_indptr, scale)
        # [slots, heads, dim] as pages of one entry.
        cache = (kv.k.unsqueeze(1), kv.v.unsqueeze(1))
        state = _run(wrapper, q, cache, *extra)
        _empty(state, _empty_rows(plan, q_indptr))
        return state

    def _over_new(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        q_indptr: tuple[int, ...],
        plan: FlashInferPlan,
        scale: float,
    ) -> AttentionState:
        """New tokens over themselves, causally."""
        k_new, v_new = (aligned(x.to(q.dtype)) for x in (k_new, v_new))
        wrapper = self._planned(plan, Kind(paged=False), q, k_new, q_indptr, scale)
        return _run(wrapper, q, k_new, v_new)

    def _planned(
        self,
        plan: FlashInferPlan,
        kind: Kind,
        q: torch.Tensor,
        k: torch.Tensor,
        q_indptr: tuple[int, ...],
        scale: float,
    ) -> Wrapper:
        """The plan's wrapper for calls like this one, planned by the first layer that makes one."""
        heads, group, dim = q.shape[1:]
        key = (kind, q_indptr, heads, group, dim, q.dtype, k.dtype, scale)
        if key in plan.wrappers:
            return plan.wrappers[key]
        rows = torch.tensor(q_indptr, dtype=torch.int32, device="cpu")
        arguments: dict[str, Any] = {"qo_indptr": rows, "causal": not kind.paged}
        if kind.paged:
            # On the host: given device tensors, FlashInfer would wait for them.
            indptr = torch.tensor(plan.entries.bounds, dtype=torch.int32, device="cpu")
            arguments |= {
                "paged_kv_indptr": indptr,
                "paged_kv_indices": plan.entries.slots,
                # 0 for a request without entries, to which 1 would give one.
                "paged_kv_last_page_len": indptr.diff().clamp(max=1),
                "page_size": 1,
            }
        else:
            arguments["kv_indptr"] = rows
        wrapper = self._wrappers.lend(kind, q.device)
        wrapper.plan(
            **arguments,
            num_qo_heads=heads * group,
            num_kv_heads=heads,
            head_dim_qk=dim,
            sm_scale=scale,
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
        )
        plan.wrappers[key] = wrapper
        return wrapper


def _run(wrapper: Wrapper, q: torch.Tensor, *args: Any) -> AttentionState:
    """Run what the wrapper was planned for and return it as a state of the contract."""
    tokens, heads, group, _ = q.shape
    lanes = aligned(q.flatten(1, 2))
    o = torch.empty(lanes.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(lanes.shape[:-1], dtype=torch.float32, device=q.device)
    wrapper.inner.run(lanes, *args, out=o, lse=lse, return_lse=True)
    # FlashInfer's logarithms are in base 2.
    return AttentionState(o.view(q.shape), lse.mul_(math.log(2)).view(tokens, heads, group))


def _empty_rows(plan: FlashInferPlan, q_indptr: tuple[int, ...]) -> torch.Tensor | None:
    """Rows without entries on the device, None where every row has some."""
    if q_indptr not in plan.empty:
        both = zip(pairwise(plan.entries.bounds), pairwise(q_indptr), strict=True)
        rows = [
            row
            for (begin, end), (first, last) in both
            if begin == end
            for row in range(first, last)
        ]
        plan.empty[q_indptr] = to_device(rows, plan.entries.slots.device).long() if rows else None
    return plan.empty[q_indptr]


def _empty(state: AttentionState, rows: torch.Tensor | None) -> None:
    """Make rows the empty state, whatever a release of FlashInfer takes for that (-5e4 in 0.6)."""
    if rows is not None:
        state.o.index_fill_(0, rows, 0.0)
        state.lse.index_fill_(0, rows, float("-inf"))

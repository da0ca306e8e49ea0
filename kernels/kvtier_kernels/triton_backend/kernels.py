"""The backend `triton`: ragged attention on a GPU, replayable by CUDA graphs, and selection.

On a CPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1): for tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton

from kvtier_kernels.base import AttentionKernels, AttentionState, HeadMap, RaggedKV, Window
from kvtier_kernels.bins import Bins
from kvtier_kernels.selection import SelectionKernels, Stretch
from kvtier_kernels.triton_backend.attention import by_slots
from kvtier_kernels.triton_backend.attention.by_lists import TritonLists
from kvtier_kernels.triton_backend.attention.dense import CUDNN, DensePrefixes, has_cudnn_attention
from kvtier_kernels.triton_backend.attention.merge import merge_two
from kvtier_kernels.triton_backend.attention.output import Output
from kvtier_kernels.triton_backend.attention.store import store_entries
from kvtier_kernels.triton_backend.launching import (
    Launch,
    dim_contiguous,
    has_numbers_of,
    launch,
    to_device,
)
from kvtier_kernels.triton_backend.memory.attend import TritonMemory
from kvtier_kernels.triton_backend.merging.bins import SortedBins
from kvtier_kernels.triton_backend.merging.homes import find_homes
from kvtier_kernels.triton_backend.planning.on_device import fill_plan
from kvtier_kernels.triton_backend.planning.plans import TritonPlan
from kvtier_kernels.triton_backend.selection.prediction import predicted_logits, window_lse
from kvtier_kernels.triton_backend.selection.window_mass import window_mass

MERGE_ROWS = 8
# Tokens of a program that stores new ones.
STORE_TOKENS = 16


class TritonSelection(SelectionKernels):
    """Scores, homes and bins on a GPU: no logits and no similarities in memory."""

    def __init__(self, launch: Launch = launch) -> None:
        self._launch = launch

    def window_mass(
        self, q: torch.Tensor, k: torch.Tensor, stretches: Sequence[Stretch], scale: float
    ) -> torch.Tensor:
        return window_mass(self._launch, q, k, stretches, scale)

    def predicted_logits(
        self, q_window: torch.Tensor, keys: torch.Tensor, scale: float, offset: torch.Tensor
    ) -> torch.Tensor:
        return predicted_logits(self._launch, q_window, keys, scale, offset)

    def window_lse(
        self,
        q_window: torch.Tensor,
        keys: torch.Tensor,
        scale: float,
        log_votes: torch.Tensor | None,
    ) -> torch.Tensor:
        return window_lse(self._launch, q_window, keys, scale, log_votes)

    def find_homes(
        self,
        keys: torch.Tensor,
        dropped: torch.Tensor,
        homes: torch.Tensor,
        lengths: torch.Tensor,
        closed: torch.Tensor,
        floor: float,
        target: torch.Tensor,
    ) -> None:
        find_homes(self._launch, keys, dropped, homes, lengths, closed, floor, target)

    def bins(self, target: torch.Tensor, count: int) -> Bins:
        return SortedBins(target, count, self._launch)


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

    def plan(
        self,
        slots: torch.Tensor,
        indptr: Sequence[int],
        log_votes: torch.Tensor | None = None,
    ) -> TritonPlan:
        on_device = to_device(indptr, slots.device)
        # Half as long, and half the registers of a tile's addresses.
        return TritonPlan(slots.int(), on_device, tuple(indptr), log_votes is not None)

    def plan_on_device(
        self,
        table: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        max_length: int,
        image: torch.Tensor | None = None,
        *,
        voted: bool = False,
        into: TritonPlan | None = None,
    ) -> TritonPlan:
        requests = rows.numel()
        if into is not None and (
            into.requests != requests or into.slots.numel() < requests * max_length
        ):
            raise ValueError(
                f"into: expected a plan of {requests} requests with room for "
                f"{requests * max_length} entries, got {into.requests} and {into.slots.numel()}"
            )
        if into is None:
            slots = torch.empty(requests * max_length, dtype=torch.int32, device=table.device)
            into = self.empty_plan(slots, requests, voted=voted)
        fill_plan(self._launch, into, table, rows, lengths, max_length, image)
        return into

    def empty_plan(self, slots: torch.Tensor, requests: int, *, voted: bool) -> TritonPlan:
        indptr = torch.zeros(requests + 1, dtype=torch.int32, device=slots.device)
        return TritonPlan(slots, indptr, None, voted)

    def store(
        self, k: torch.Tensor, v: torch.Tensor, kv: RaggedKV, slots: torch.Tensor, heads: HeadMap
    ) -> None:
        k, v = dim_contiguous(k), dim_contiguous(v)
        tokens, _, dim = k.shape
        self._launch(
            store_entries,
            (triton.cdiv(tokens, STORE_TOKENS), len(heads.heads)),
            k,
            v,
            kv.k,
            kv.v,
            slots,
            heads.ids,
            tokens,
            *k.stride()[:2],
            *v.stride()[:2],
            *kv.k.stride()[:2],
            *kv.v.stride()[:2],
            DIM=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            BLOCK_T=STORE_TOKENS,
        )

    def decode(
        self, q: torch.Tensor, kv: RaggedKV, plan: TritonPlan, scale: float
    ) -> AttentionState:
        return by_slots.decode(self._launch, q, kv, plan, scale, Output(q))

    def decode_heads(
        self,
        q: torch.Tensor,
        kv: RaggedKV,
        plan: TritonPlan,
        scale: float,
        heads: HeadMap,
        out: torch.Tensor,
    ) -> None:
        by_slots.decode(self._launch, q, kv, plan, scale, Output(q, heads, out))

    def extend(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        q_indptr: Sequence[int],
        kv: RaggedKV,
        plan: TritonPlan,
        scale: float,
        window: Window | None = None,
    ) -> AttentionState:
        return self._extend(q, k_new, v_new, q_indptr, kv, plan, scale, Output(q), window)

    def extend_shapes(self, q: torch.Tensor, chunk: int, context: int) -> Iterator[tuple[int, int]]:
        yield 1, 1
        dense = self._dense_for(q)
        if dense is not None:
            yield from dense.shapes(chunk, context)

    def extend_heads(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        q_indptr: Sequence[int],
        kv: RaggedKV,
        plan: TritonPlan,
        scale: float,
        heads: HeadMap,
        out: torch.Tensor,
        window: Window | None = None,
    ) -> None:
        output = Output(q, heads, out)
        self._extend(q, k_new, v_new, q_indptr, kv, plan, scale, output, window)

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

    def _extend(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        q_indptr: Sequence[int],
        kv: RaggedKV,
        plan: TritonPlan,
        scale: float,
        output: Output,
        window: Window | None,
    ) -> AttentionState:
        # A library knows neither windows nor votes.
        plain = window is None and not plan.voted
        dense = self._dense_for(q) if plain else None
        division = None if dense is None else dense.divide(plan, q_indptr)
        if dense is None or division is None:
            return by_slots.extend(
                self._launch, q, k_new, v_new, q_indptr, kv, plan, scale, output, window
            )
        parts, rest = division
        heads = output.heads_of_q
        if rest is None:
            state = AttentionState(*output.buffers())
            dense.new_tokens(parts, q, k_new, v_new, scale, heads, state)
        else:
            state = by_slots.extend(
                self._launch, q, k_new, v_new, q_indptr, kv, rest, scale, output, None
            )
        dense.add(parts, q, kv, scale, heads, state)
        return state

    def _dense_for(self, q: torch.Tensor) -> DensePrefixes | None:
        if self._dense is None and has_cudnn_attention(q):
            return CUDNN
        return self._dense


__all__ = ["TritonKernels", "TritonSelection"]

"""The backend `triton`: plan-free ragged attention on a GPU, replayable by CUDA graphs.

Decoding is split KV in two stages over equal stretches of entries (`schedule`, `decode`, `merge`);
extending is one pass over prefix and causal tail (`extend`), cut in splits where there are few new
tokens. On a CPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1): for tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton

from kvtier_kernels.base import AttentionKernels, AttentionState, HeadMap, RaggedKV, Window
from kvtier_kernels.triton_backend.decode import decode_units
from kvtier_kernels.triton_backend.dense import CUDNN, DensePrefixes, has_cudnn_attention
from kvtier_kernels.triton_backend.extend import extend_blocks
from kvtier_kernels.triton_backend.launching import (
    Launch,
    dim_contiguous,
    has_wide_products,
    is_ieee,
    launch,
    to_device,
)
from kvtier_kernels.triton_backend.merge import merge_two
from kvtier_kernels.triton_backend.output import Output, merged, state_buffers
from kvtier_kernels.triton_backend.plans import (
    TritonPlan,
    fill_schedule,
    row_blocks,
    schedule_for,
    table_of,
)
from kvtier_kernels.triton_backend.store import store_entries
from kvtier_kernels.triton_backend.tables import count_kept, write_kept
from kvtier_kernels.triton_backend.tiles import decode_entries, extend_tile, num_splits

# Columns of a slot table per program.
TABLE_BLOCK = 1024
# Of a thread. Told nothing, ptxas spills to fit two programs where shared memory has room for one.
ALL_REGISTERS = 255
MERGE_ROWS = 8
# Tokens of a program that stores new ones.
STORE_TOKENS = 16


class TritonKernels(AttentionKernels):
    """See the module docstring."""

    name = "triton"
    plans_on_device = True

    def __init__(self, launch: Launch = launch, dense: DensePrefixes | None = None) -> None:
        """dense: computes long prefixes on any device. None: cuDNN does, where it can."""
        self._launch = launch
        self._dense = dense

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
        requests, device = rows.numel(), table.device
        if into is not None and (
            into.requests != requests or into.slots.numel() < requests * max_length
        ):
            raise ValueError(
                f"into: expected a plan of {requests} requests with room for "
                f"{requests * max_length} entries, got {into.requests} and {into.slots.numel()}"
            )
        blocks = triton.cdiv(max_length, TABLE_BLOCK)
        if into is None:
            slots = torch.empty(requests * max_length, dtype=torch.int32, device=device)
            into = self.empty_plan(slots, requests, voted=voted)
        counts = torch.empty(requests, blocks, dtype=torch.int32, device=device)
        arguments = (table, table if image is None else image, rows, lengths, counts)
        options = {"BLOCK": TABLE_BLOCK, "IMAGE": image is not None}
        grid = (requests, blocks)
        self._launch(count_kept, grid, *arguments, table.stride(0), blocks, **options)
        ends = counts.view(-1).cumsum(0)
        outcome = (ends, into.slots, into.indptr)
        self._launch(write_kept, grid, *arguments, *outcome, table.stride(0), blocks, **options)
        for schedule in into.schedules.values():
            fill_schedule(self._launch, schedule, into)
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
        return self._decode(q, kv, plan, scale, Output(q))

    def decode_heads(
        self,
        q: torch.Tensor,
        kv: RaggedKV,
        plan: TritonPlan,
        scale: float,
        heads: HeadMap,
        out: torch.Tensor,
    ) -> None:
        self._decode(q, kv, plan, scale, Output(q, heads, out))

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

    def _decode(
        self, q: torch.Tensor, kv: RaggedKV, plan: TritonPlan, scale: float, output: Output
    ) -> AttentionState:
        requests, _, group, dim = q.shape
        heads = output.num_heads
        q = dim_contiguous(q)
        k, v = dim_contiguous(kv.k), dim_contiguous(kv.v)
        schedule = schedule_for(self._launch, plan, heads)
        part_o, part_lse = state_buffers((schedule.max_units, heads, group, dim), q.device)
        mode, votes, strides = _votes(kv, plan)
        ieee = is_ieee(q)
        self._launch(
            decode_units,
            (schedule.max_units, heads),
            q,
            k,
            v,
            votes,
            plan.slots,
            plan.indptr,
            schedule.units_indptr,
            schedule.unit_request,
            schedule.stretch,
            output.head_ids,
            part_o,
            part_lse,
            scale,
            requests,
            *q.stride()[:3],
            *k.stride()[:2],
            *v.stride()[:2],
            *strides,
            GROUP=group,
            DIM=dim,
            BLOCK_G=max(16, triton.next_power_of_2(group)),
            BLOCK_D=max(16, triton.next_power_of_2(dim)),
            BLOCK_N=decode_entries(ieee),
            VOTES=mode,
            IEEE=ieee,
            MAPPED=output.mapped,
            num_warps=4,
            num_stages=3,
        )
        return merged(self._launch, part_o, part_lse, schedule.units_indptr, output)

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
            return self._extend_by_slots(q, k_new, v_new, q_indptr, kv, plan, scale, output, window)
        parts, rest = division
        heads = output.heads_of_q
        if rest is None:
            state = AttentionState(*output.buffers())
            dense.new_tokens(parts, q, k_new, v_new, scale, heads, state)
        else:
            state = self._extend_by_slots(q, k_new, v_new, q_indptr, kv, rest, scale, output, None)
        dense.add(parts, q, kv, scale, heads, state)
        return state

    def _dense_for(self, q: torch.Tensor) -> DensePrefixes | None:
        if self._dense is None and has_cudnn_attention(q):
            return CUDNN
        return self._dense

    def _extend_by_slots(
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
        assert plan.bounds is not None, "a plan for graphs is for decoding"
        tokens, _, group, dim = q.shape
        heads = output.num_heads
        q, k_new, v_new = (dim_contiguous(x) for x in (q, k_new, v_new))
        k, v = dim_contiguous(kv.k), dim_contiguous(kv.v)
        ieee = is_ieee(q)
        mode, votes, strides = _votes(kv, plan)
        tile = extend_tile(dim, ieee, laden=ieee or window is not None or mode == 2)
        block_rows, block_entries = tile.rows, tile.entries
        blocks = row_blocks(plan, q_indptr, group, block_rows)
        num_blocks = blocks.shape[1]
        splits = num_splits(num_blocks * heads, plan.bounds, q.device)
        if splits == 1:
            o, lse = output.buffers()
        else:
            o, lse = state_buffers((tokens * splits, heads, group, dim), q.device)
        rows = table_of(plan, tuple(q_indptr))
        positions, settled, starts = plan.slots, plan.slots, plan.indptr
        sink, recent = 0, 0
        if window is not None:
            positions, settled = window.positions, window.settled.view(torch.uint8)
            starts = table_of(plan, tuple(window.q_start))
            sink, recent = window.sink_tokens, window.recent_tokens
        self._launch(
            extend_blocks,
            (num_blocks, heads, splits),
            q,
            k_new,
            v_new,
            k,
            v,
            votes,
            plan.slots,
            plan.indptr,
            rows,
            blocks[0],
            blocks[1],
            positions,
            settled,
            starts,
            output.head_ids,
            o,
            lse,
            scale,
            o.shape[1],
            sink,
            recent,
            *q.stride()[:3],
            *k_new.stride()[:2],
            *v_new.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            *strides,
            GROUP=group,
            DIM=dim,
            BLOCK_M=block_rows,
            BLOCK_D=max(16, triton.next_power_of_2(dim)),
            BLOCK_N=block_entries,
            VOTES=mode,
            WINDOW=window is not None,
            IEEE=ieee,
            MAPPED=output.mapped,
            num_warps=tile.warps,
            num_stages=tile.stages,
            maxnreg=None if dim <= 128 or has_wide_products() else ALL_REGISTERS,
        )
        if splits == 1:
            return AttentionState(o, lse)
        parts = torch.arange(0, tokens * splits + 1, splits, dtype=torch.int32, device=q.device)
        return merged(self._launch, o, lse, parts, output)

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


def _votes(kv: RaggedKV, plan: TritonPlan) -> tuple[int, torch.Tensor, tuple[int, int, int]]:
    """How votes come, themselves (or any tensor, not read), and their strides."""
    votes = kv.log_votes
    if votes is None or not plan.voted:
        return 0, kv.k, (0, 0, 0)
    if votes.ndim == 1:
        return 1, votes, (votes.stride(0), 0, 0)
    return 2, votes, (votes.stride(0), votes.stride(1), votes.stride(2))


__all__ = ["TritonKernels"]

"""The backend `triton`: plan-free ragged attention on a GPU, replayable by CUDA graphs.

Decoding is split KV in two stages over equal stretches of entries (`schedule`, `decode`, `merge`);
extending is one pass over prefix and causal tail (`extend`), cut in splits where there are few new
tokens. On a CPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1): for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton

from kvtier_kernels.base import AttentionKernels, AttentionState, RaggedKV, Window
from kvtier_kernels.triton_backend.decode import decode_units
from kvtier_kernels.triton_backend.extend import extend_blocks
from kvtier_kernels.triton_backend.launching import (
    Launch,
    dim_contiguous,
    has_wide_products,
    is_ieee,
    is_interpreted,
    launch,
    multiprocessors,
    to_device,
)
from kvtier_kernels.triton_backend.merge import merge_parts, merge_two
from kvtier_kernels.triton_backend.plans import (
    LEAST_STRETCH,
    TritonPlan,
    fill_schedule,
    row_blocks,
    schedule_for,
    table_of,
)
from kvtier_kernels.triton_backend.tables import count_kept, write_kept

MAX_SPLITS = 16
# Columns of a slot table per program.
TABLE_BLOCK = 1024
# Entries of a decode program's tile: few, so that it loads one while it computes with another, and
# five programs still fit a multiprocessor. Without tensor cores a tile lies in registers.
DECODE_ENTRIES = 32
DECODE_ENTRIES_IEEE = 16
# In the interpreter every operation costs the same, however much it does.
INTERPRETED_TILE = 64
# Of a thread. Told nothing, ptxas spills to fit two programs where shared memory has room for one.
ALL_REGISTERS = 255
MERGE_PARTS = 32
MERGE_ROWS = 8


class TritonKernels(AttentionKernels):
    """See the module docstring."""

    name = "triton"
    plans_on_device = True

    def __init__(self, launch: Launch = launch) -> None:
        self._launch = launch

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

    def decode(
        self, q: torch.Tensor, kv: RaggedKV, plan: TritonPlan, scale: float
    ) -> AttentionState:
        requests, heads, group, dim = q.shape
        q = dim_contiguous(q)
        k, v = dim_contiguous(kv.k), dim_contiguous(kv.v)
        schedule = schedule_for(self._launch, plan, heads)
        part_o, part_lse = _state_buffers((schedule.max_units, heads, group, dim), q.device)
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
            part_o,
            part_lse,
            scale,
            requests,
            *q.stride()[:3],
            *k.stride()[:2],
            *v.stride()[:2],
            *strides,
            HEADS=heads,
            GROUP=group,
            DIM=dim,
            BLOCK_G=max(16, triton.next_power_of_2(group)),
            BLOCK_D=max(16, triton.next_power_of_2(dim)),
            BLOCK_N=_decode_entries(ieee),
            VOTES=mode,
            IEEE=ieee,
            num_warps=4,
            num_stages=3,
        )
        return _merged(self._launch, part_o, part_lse, schedule.units_indptr, q)

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
        assert plan.bounds is not None, "a plan for graphs is for decoding"
        tokens, heads, group, dim = q.shape
        q, k_new, v_new = (dim_contiguous(x) for x in (q, k_new, v_new))
        k, v = dim_contiguous(kv.k), dim_contiguous(kv.v)
        ieee = is_ieee(q)
        block_rows, block_entries = _extend_tile(dim, ieee)
        blocks = row_blocks(plan, q_indptr, group, block_rows)
        num_blocks = blocks.shape[1]
        splits = _splits(num_blocks * heads, plan.bounds, q.device)
        shape = (tokens * splits, heads, group, dim)
        o, lse = _state_buffers(shape, q.device, q.dtype if splits == 1 else torch.float32)
        mode, votes, strides = _votes(kv, plan)
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
            o,
            lse,
            scale,
            sink,
            recent,
            *q.stride()[:3],
            *k_new.stride()[:2],
            *v_new.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            *strides,
            SPLITS=splits,
            HEADS=heads,
            GROUP=group,
            DIM=dim,
            BLOCK_M=block_rows,
            BLOCK_D=max(16, triton.next_power_of_2(dim)),
            BLOCK_N=block_entries,
            VOTES=mode,
            WINDOW=window is not None,
            IEEE=ieee,
            num_warps=_extend_warps(dim, ieee or window is not None or mode == 2),
            num_stages=2 if dim <= 128 else 3,
            maxnreg=None if dim <= 128 or has_wide_products() else ALL_REGISTERS,
        )
        if splits == 1:
            return AttentionState(o, lse)
        parts = torch.arange(0, tokens * splits + 1, splits, dtype=torch.int32, device=q.device)
        return _merged(self._launch, o, lse, parts, q)

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


def _merged(
    launch: Launch,
    part_o: torch.Tensor,
    part_lse: torch.Tensor,
    parts: torch.Tensor,
    q: torch.Tensor,
) -> AttentionState:
    """The state of every row of q, from the parts that it owns."""
    rows, heads, group, dim = q.shape
    o, lse = _state_buffers(q.shape, q.device, q.dtype)
    lanes = heads * group
    launch(
        merge_parts,
        (rows, lanes),
        part_o,
        part_lse,
        parts,
        o,
        lse,
        LANES=lanes,
        DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_P=MERGE_PARTS,
    )
    return AttentionState(o, lse)


def _state_buffers(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    o = torch.empty(shape, dtype=dtype, device=device)
    return o, torch.empty(shape[:-1], dtype=torch.float32, device=device)


def _splits(programs: int, bounds: Sequence[int], device: torch.device) -> int:
    """Of the prefix: as many as keep the device busy, where that is long enough to be worth it."""
    longest = max((end - begin for begin, end in pairwise(bounds)), default=0)
    wanted = triton.cdiv(2 * multiprocessors(device), max(1, programs))
    useful = max(1, longest // (4 * LEAST_STRETCH))
    # A power of two, so that few variants are compiled.
    return int(min(MAX_SPLITS, triton.next_power_of_2(min(wanted, useful))))


def _votes(kv: RaggedKV, plan: TritonPlan) -> tuple[int, torch.Tensor, tuple[int, int, int]]:
    """How votes come, themselves (or any tensor, not read), and their strides."""
    votes = kv.log_votes
    if votes is None or not plan.voted:
        return 0, kv.k, (0, 0, 0)
    if votes.ndim == 1:
        return 1, votes, (votes.stride(0), 0, 0)
    return 2, votes, (votes.stride(0), votes.stride(1), votes.stride(2))


def _decode_entries(ieee: bool) -> int:
    if is_interpreted():
        return INTERPRETED_TILE
    return DECODE_ENTRIES_IEEE if ieee else DECODE_ENTRIES


def _extend_tile(dim: int, ieee: bool) -> tuple[int, int]:
    """Rows (tokens times group) and entries."""
    if is_interpreted():
        return INTERPRETED_TILE, INTERPRETED_TILE
    return (64, 64) if dim <= 128 and not ieee else (32, 32)


def _extend_warps(dim: int, laden: bool) -> int:
    """What keeps to the registers (`ahead`). laden: float32, with a window, or votes per query
    head."""
    return 8 if dim > 128 or laden or not has_wide_products() else 4


__all__ = ["TritonKernels"]

"""The backend `triton`: plan-free ragged attention on a GPU, replayable by CUDA graphs.

Decoding is split KV in two stages over equal stretches of entries (`schedule`, `decode`, `merge`);
extending is one pass over prefix and causal tail (`extend`), cut in splits where there are few new
tokens. On a CPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1): for tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import triton

from kvtier_kernels.base import AttentionKernels, AttentionState, HeadMap, RaggedKV, Window
from kvtier_kernels.triton_backend.decode import decode_units
from kvtier_kernels.triton_backend.dense import (
    DensePrefixes,
    cudnn_attention,
    has_cudnn_attention,
)
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
from kvtier_kernels.triton_backend.store import store_entries
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
# Tokens of a program that stores new ones.
STORE_TOKENS = 16


class TritonKernels(AttentionKernels):
    """See the module docstring."""

    name = "triton"
    plans_on_device = True

    def __init__(self, launch: Launch = launch, dense: DensePrefixes | None = None) -> None:
        """dense: who computes long prefixes, whatever the device; None is cuDNN where it can."""
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
        return self._decode(q, kv, plan, scale, _Output(q))

    def decode_heads(
        self,
        q: torch.Tensor,
        kv: RaggedKV,
        plan: TritonPlan,
        scale: float,
        heads: HeadMap,
        out: torch.Tensor,
    ) -> None:
        self._decode(q, kv, plan, scale, _Output(q, heads, out))

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
        return self._extend(q, k_new, v_new, q_indptr, kv, plan, scale, _Output(q), window)

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
        output = _Output(q, heads, out)
        self._extend(q, k_new, v_new, q_indptr, kv, plan, scale, output, window)

    def _decode(
        self, q: torch.Tensor, kv: RaggedKV, plan: TritonPlan, scale: float, output: _Output
    ) -> AttentionState:
        requests, _, group, dim = q.shape
        heads = output.num_heads
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
            BLOCK_N=_decode_entries(ieee),
            VOTES=mode,
            IEEE=ieee,
            MAPPED=output.mapped,
            num_warps=4,
            num_stages=3,
        )
        return _merged(self._launch, part_o, part_lse, schedule.units_indptr, output)

    def _extend(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        q_indptr: Sequence[int],
        kv: RaggedKV,
        plan: TritonPlan,
        scale: float,
        output: _Output,
        window: Window | None,
    ) -> AttentionState:
        division = None
        dense = self._dense_for(q)
        if dense is not None and window is None and not plan.voted:
            division = dense.divide(plan, q_indptr)
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

    def extend_shapes(self, q: torch.Tensor, chunk: int, context: int) -> Iterator[tuple[int, int]]:
        yield 1, 1
        dense = self._dense_for(q)
        if dense is not None:
            yield from dense.shapes(chunk, context)

    def _dense_for(self, q: torch.Tensor) -> DensePrefixes | None:
        if self._dense is None and has_cudnn_attention(q):
            return DensePrefixes(cudnn_attention)
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
        output: _Output,
        window: Window | None,
    ) -> AttentionState:
        assert plan.bounds is not None, "a plan for graphs is for decoding"
        tokens, _, group, dim = q.shape
        heads = output.num_heads
        q, k_new, v_new = (dim_contiguous(x) for x in (q, k_new, v_new))
        k, v = dim_contiguous(kv.k), dim_contiguous(kv.v)
        ieee = is_ieee(q)
        mode, votes, strides = _votes(kv, plan)
        tile = _extend_tile(dim, ieee, laden=ieee or window is not None or mode == 2)
        block_rows, block_entries = tile.rows, tile.entries
        blocks = row_blocks(plan, q_indptr, group, block_rows)
        num_blocks = blocks.shape[1]
        splits = _splits(num_blocks * heads, plan.bounds, q.device)
        if splits == 1:
            o, lse = output.buffers()
        else:
            o, lse = _state_buffers((tokens * splits, heads, group, dim), q.device)
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
        return _merged(self._launch, o, lse, parts, output)

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


@dataclass(frozen=True)
class _Output:
    """Where a call's result goes: a state of its own, or some heads of what holds all of them.

    q: the call's queries, `[rows, heads, group, dim]`, of all KV heads where `heads` are some.
    """

    q: torch.Tensor
    heads: HeadMap | None = None
    out: torch.Tensor | None = None

    @property
    def mapped(self) -> bool:
        return self.heads is not None

    @property
    def num_heads(self) -> int:
        return self.q.shape[1] if self.heads is None else len(self.heads.heads)

    @property
    def heads_of_q(self) -> Sequence[int]:
        return range(self.num_heads) if self.heads is None else self.heads.heads

    @property
    def head_ids(self) -> torch.Tensor:
        """Any tensor, not read, where nothing is mapped."""
        return self.q if self.heads is None else self.heads.ids

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """o, of all KV heads where mapped, and lse of this call's heads."""
        rows, _, group, dim = self.q.shape
        shape = (rows, self.num_heads, group, dim)
        if self.out is None:
            return _state_buffers(shape, self.q.device, self.q.dtype)
        assert self.out.is_contiguous(), "heads are placed in what lies in one piece"
        return self.out, torch.empty(shape[:-1], dtype=torch.float32, device=self.q.device)


def _merged(
    launch: Launch,
    part_o: torch.Tensor,
    part_lse: torch.Tensor,
    parts: torch.Tensor,
    output: _Output,
) -> AttentionState:
    """The state of every row of the output, from the parts that it owns."""
    o, lse = output.buffers()
    rows, heads, group, dim = o.shape
    lanes = output.num_heads * group
    launch(
        merge_parts,
        (rows, lanes),
        part_o,
        part_lse,
        parts,
        output.head_ids,
        o,
        lse,
        heads * group,
        GROUP=group,
        DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_P=MERGE_PARTS,
        MAPPED=output.mapped,
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


class _Tile(NamedTuple):
    """rows: tokens times group. stages: tiles of entries in flight, the one in use included."""

    rows: int
    entries: int
    warps: int
    stages: int


def _extend_tile(dim: int, ieee: bool, *, laden: bool) -> _Tile:
    """The fastest on an H100 of those that keep to the registers, elsewhere what does (`ahead`).

    laden: float32, with a window, or votes per query head.
    """
    if is_interpreted():
        return _Tile(INTERPRETED_TILE, INTERPRETED_TILE, 4, 2)
    if dim > 128:
        return _Tile(32, 32, 8, 3)
    if not has_wide_products():
        return _Tile(32, 32, 8, 2) if ieee else _Tile(64, 64, 8, 2)
    if ieee:
        # By Triton 3.6 and by 3.8.
        return _Tile(32, 32, 4, 1)
    return _Tile(128, 32, 8, 4) if laden else _Tile(64, 64, 4, 3)


__all__ = ["TritonKernels"]

"""The backend `triton`: plan-free ragged attention on a GPU, replayable by CUDA graphs.

Decoding is split KV in two stages over equal stretches of entries (`schedule`, `decode`, `merge`);
extending is one pass over prefix and causal tail (`extend`), cut in splits where there are few new
tokens. On a CPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1): for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import triton

from kvtier_kernels.base import (
    AttentionKernels,
    AttentionState,
    KernelUnavailableError,
    RaggedKV,
    Window,
)
from kvtier_kernels.triton_backend.decode import decode_units
from kvtier_kernels.triton_backend.extend import extend_blocks
from kvtier_kernels.triton_backend.merge import merge_parts, merge_two
from kvtier_kernels.triton_backend.schedule import schedule_units
from kvtier_kernels.triton_backend.tables import count_kept, write_kept

# Entries of a unit are a multiple of this: fewer cost more in merging than they gain in balance.
LEAST_STRETCH = 256
# Units to aim for, per multiprocessor and over all heads of a class.
UNITS_PER_SM = 4
MAX_SPLITS = 16
SCHEDULE_BLOCK = 128
# Columns of a slot table per program.
TABLE_BLOCK = 1024
MERGE_PARTS = 32
MERGE_ROWS = 8
# Without a GPU: as many as the smallest current one has.
INTERPRETED_SMS = 16


# Runs a kernel on a grid; its other arguments are the kernel's.
Launch = Callable[..., Any]


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    kernel[grid](*args, **options)


@dataclass
class Schedule:
    """How decoding with so many heads is cut in units; see `schedule_units`."""

    target_units: int
    stretch: torch.Tensor
    units_indptr: torch.Tensor
    unit_request: torch.Tensor

    @property
    def max_units(self) -> int:
        return self.unit_request.numel()


@dataclass
class TritonPlan:
    """A slot table on the device.

    slots:     [entries or more] int64. indptr: [requests + 1] int32.
    bounds:    indptr on the host, which extending wants; None in a plan that graphs replay.
    voted:     whether any entry may have votes.
    schedules: by number of heads, as layers ask for them.
    tables:    other small tables that layers ask for, by what they are made of.
    """

    slots: torch.Tensor
    indptr: torch.Tensor
    bounds: tuple[int, ...] | None
    voted: bool
    schedules: dict[int, Schedule] = field(default_factory=dict)
    tables: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return self.indptr.numel() - 1


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
        return TritonPlan(slots, on_device, tuple(indptr), log_votes is not None)

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
            _fill(self._launch, schedule, into)
        return into

    def empty_plan(self, slots: torch.Tensor, requests: int, *, voted: bool) -> TritonPlan:
        indptr = torch.zeros(requests + 1, dtype=torch.int32, device=slots.device)
        return TritonPlan(slots, indptr, None, voted)

    def decode(
        self, q: torch.Tensor, kv: RaggedKV, plan: TritonPlan, scale: float
    ) -> AttentionState:
        requests, heads, group, dim = q.shape
        q = _dim_contiguous(q)
        k, v = _dim_contiguous(kv.k), _dim_contiguous(kv.v)
        schedule = _schedule(self._launch, plan, heads)
        part_o, part_lse = _state_buffers((schedule.max_units, heads, group, dim), q.device)
        mode, votes, strides = _votes(kv, plan)
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
            BLOCK_N=_block_entries(dim),
            VOTES=mode,
            IEEE=is_ieee(q),
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
        q, k_new, v_new = (_dim_contiguous(x) for x in (q, k_new, v_new))
        k, v = _dim_contiguous(kv.k), _dim_contiguous(kv.v)
        block_rows = _block_rows(dim)
        blocks = _row_blocks(plan, q_indptr, group, block_rows)
        num_blocks = blocks.shape[1]
        splits = _splits(num_blocks * heads, plan.bounds, q.device)
        shape = (tokens * splits, heads, group, dim)
        o, lse = _state_buffers(shape, q.device, q.dtype if splits == 1 else torch.float32)
        mode, votes, strides = _votes(kv, plan)
        rows = _table(plan, tuple(q_indptr))
        positions, settled, starts = plan.slots, plan.slots, plan.indptr
        sink, recent = 0, 0
        if window is not None:
            positions, settled = window.positions, window.settled.view(torch.uint8)
            starts = _table(plan, tuple(window.q_start))
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
            BLOCK_N=_block_entries(dim),
            VOTES=mode,
            WINDOW=window is not None,
            IEEE=is_ieee(q),
            num_warps=_extend_warps(dim, window is not None or mode == 2),
            num_stages=2 if dim <= 128 else 3,
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


def check_device() -> None:
    """Raise KernelUnavailableError where no kernel could run."""
    if not (torch.cuda.is_available() or is_interpreted()):
        raise KernelUnavailableError(
            "kernels: 'triton' needs a CUDA device, and there is none (TRITON_INTERPRET=1 runs it "
            "on the CPU, for tests)"
        )


def is_interpreted() -> bool:
    """Whether Triton was told, before it was imported, to run its kernels in Python."""
    return not isinstance(decode_units, triton.JITFunction)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _schedule(launch: Launch, plan: TritonPlan, heads: int) -> Schedule:
    """The plan's schedule for so many heads, made by the first layer that has them."""
    known = plan.schedules.get(heads)
    if known is not None:
        return known
    device = plan.indptr.device
    target = triton.cdiv(UNITS_PER_SM * _multiprocessors(device), heads)
    schedule = Schedule(
        target,
        torch.empty(1, dtype=torch.int32, device=device),
        torch.empty_like(plan.indptr),
        torch.empty(target + plan.requests, dtype=torch.int32, device=device),
    )
    _fill(launch, schedule, plan)
    plan.schedules[heads] = schedule
    return schedule


def _fill(launch: Launch, schedule: Schedule, plan: TritonPlan) -> None:
    launch(
        schedule_units,
        (triton.cdiv(schedule.max_units, SCHEDULE_BLOCK),),
        plan.indptr,
        schedule.units_indptr,
        schedule.unit_request,
        schedule.stretch,
        plan.requests,
        schedule.max_units,
        schedule.target_units,
        LEAST=LEAST_STRETCH,
        BLOCK_R=max(16, triton.next_power_of_2(plan.requests + 1)),
        BLOCK_U=SCHEDULE_BLOCK,
    )


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


def _table(plan: TritonPlan, values: tuple[int, ...]) -> torch.Tensor:
    """Ints on the device, copied there once for all layers of a step."""
    if values not in plan.tables:
        plan.tables[values] = to_device(values, plan.indptr.device)
    return plan.tables[values]


def _row_blocks(
    plan: TritonPlan, q_indptr: Sequence[int], group: int, block_rows: int
) -> torch.Tensor:
    """[2, blocks] int32: each block's request, and its first row there."""
    key = ("blocks", tuple(q_indptr), group, block_rows)
    if key in plan.tables:
        return plan.tables[key]
    owners: list[int] = []
    rows: list[int] = []
    for request, (begin, end) in enumerate(pairwise(q_indptr)):
        firsts = range(0, (end - begin) * group, block_rows)
        owners += [request] * len(firsts)
        rows += firsts
    plan.tables[key] = to_device([owners, rows], plan.indptr.device)
    return plan.tables[key]


def _splits(programs: int, bounds: Sequence[int], device: torch.device) -> int:
    """Of the prefix: as many as keep the device busy, where that is long enough to be worth it."""
    longest = max((end - begin for begin, end in pairwise(bounds)), default=0)
    wanted = triton.cdiv(2 * _multiprocessors(device), max(1, programs))
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


def _dim_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _block_entries(dim: int) -> int:
    return 64 if dim <= 128 else 32


def _block_rows(dim: int) -> int:
    """Rows (tokens times group) of an extend program."""
    return 64 if dim <= 128 else 32


def _extend_warps(dim: int, laden: bool) -> int:
    """What keeps to the registers (`ahead`). laden: with a window, or votes per query head."""
    return 8 if dim > 128 or laden or not has_wide_products() else 4


def has_wide_products() -> bool:
    """Whether matrix products take their tiles from shared memory, as on Hopper and data-centre
    Blackwell; elsewhere they go through registers, which others then lack."""
    if is_interpreted():
        return True
    return triton.runtime.driver.active.get_current_target().arch // 10 in (9, 10, 11)


def is_ieee(q: torch.Tensor) -> bool:
    """float32 is for comparing: tensor cores' TF32 would not do. Nor does the interpreter, which
    takes bfloat16 for integers, multiply anything else."""
    return q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and is_interpreted())


def to_device(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    host = torch.tensor(values, dtype=torch.int32)
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host


__all__ = [
    "Launch",
    "TritonKernels",
    "TritonPlan",
    "check_device",
    "has_wide_products",
    "is_ieee",
    "is_interpreted",
    "launch",
    "to_device",
]

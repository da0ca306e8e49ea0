"""Plans of this backend: a slot table on the device, and what layers make of it once for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import triton

from kvtier_kernels.triton_backend.launching import Launch, multiprocessors, to_device
from kvtier_kernels.triton_backend.planning.schedule import schedule_units

# Entries of a unit are a multiple of this: fewer cost more in merging than they gain in balance.
LEAST_STRETCH = 256
# Units to aim for, per multiprocessor and over all heads of a class.
UNITS_PER_SM = 4
# Units times requests of a schedule's tile.
SCHEDULE_TILE = 8192


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

    slots:     [entries or more] int32. indptr: [requests + 1] int32.
    bounds:    indptr on the host, which extending wants; None in a plan that graphs replay.
    voted:     whether any entry may have votes.
    schedules: by number of heads, as layers ask for them.
    tables:    other small tables that layers ask for, by what they are made of.
    divisions: what `dense` made of it for extending, by q_indptr.
    """

    slots: torch.Tensor
    indptr: torch.Tensor
    bounds: tuple[int, ...] | None
    voted: bool
    schedules: dict[int, Schedule] = field(default_factory=dict)
    tables: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)
    divisions: dict[tuple[int, ...], Any] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return self.indptr.numel() - 1


def schedule_for(launch: Launch, plan: TritonPlan, heads: int) -> Schedule:
    """The plan's schedule for so many heads, made by the first layer that has them."""
    known = plan.schedules.get(heads)
    if known is not None:
        return known
    device = plan.indptr.device
    target = triton.cdiv(UNITS_PER_SM * multiprocessors(device), heads)
    schedule = Schedule(
        target,
        torch.empty(1, dtype=torch.int32, device=device),
        torch.empty_like(plan.indptr),
        torch.empty(target + plan.requests, dtype=torch.int32, device=device),
    )
    fill_schedule(launch, schedule, plan)
    plan.schedules[heads] = schedule
    return schedule


def fill_schedule(launch: Launch, schedule: Schedule, plan: TritonPlan) -> None:
    block_requests = max(16, triton.next_power_of_2(plan.requests + 1))
    block_units = max(1, min(128, SCHEDULE_TILE // block_requests))
    launch(
        schedule_units,
        (triton.cdiv(schedule.max_units, block_units),),
        plan.indptr,
        schedule.units_indptr,
        schedule.unit_request,
        schedule.stretch,
        plan.requests,
        schedule.max_units,
        schedule.target_units,
        LEAST=LEAST_STRETCH,
        BLOCK_R=block_requests,
        BLOCK_U=block_units,
    )


def table_of(plan: TritonPlan, values: tuple[int, ...]) -> torch.Tensor:
    """Ints on the device, copied there once for all layers of a step."""
    if values not in plan.tables:
        plan.tables[values] = to_device(values, plan.indptr.device)
    return plan.tables[values]


def row_blocks(
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


__all__ = [
    "LEAST_STRETCH",
    "Schedule",
    "TritonPlan",
    "fill_schedule",
    "row_blocks",
    "schedule_for",
    "table_of",
]

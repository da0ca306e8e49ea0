"""Plans made on the device: a slot table out of the engine's rows, and the schedules over it."""

from __future__ import annotations

import torch
import triton

from kvtier_kernels.triton_backend.launching import Launch
from kvtier_kernels.triton_backend.planning.plans import TritonPlan, fill_schedule
from kvtier_kernels.triton_backend.planning.tables import count_kept, write_kept

# Columns of a slot table per program.
TABLE_BLOCK = 1024


def fill_plan(
    launch: Launch,
    plan: TritonPlan,
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    max_length: int,
    image: torch.Tensor | None,
) -> None:
    """Make the plan that of these rows, as `AttentionKernels.plan_on_device` says; it has room."""
    requests, device = rows.numel(), table.device
    blocks = triton.cdiv(max_length, TABLE_BLOCK)
    counts = torch.empty(requests, blocks, dtype=torch.int32, device=device)
    arguments = (table, table if image is None else image, rows, lengths, counts)
    options = {"BLOCK": TABLE_BLOCK, "IMAGE": image is not None}
    grid = (requests, blocks)
    launch(count_kept, grid, *arguments, table.stride(0), blocks, **options)
    ends = counts.view(-1).cumsum(0)
    outcome = (ends, plan.slots, plan.indptr)
    launch(write_kept, grid, *arguments, *outcome, table.stride(0), blocks, **options)
    for schedule in plan.schedules.values():
        fill_schedule(launch, schedule, plan)


__all__ = ["fill_plan"]

"""Plans of this backend: a slot table on the device, and what layers make of it once for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from kvtier_kernels.triton_backend.launching import to_device


@dataclass
class TritonPlan:
    """A slot table on the device.

    slots:     [entries] int32. indptr: [requests + 1] int32.
    bounds:    indptr on the host.
    tables:    other small tables that layers ask for, by what they are made of.
    divisions: what `dense` made of it, by q_indptr.
    """

    slots: torch.Tensor
    indptr: torch.Tensor
    bounds: tuple[int, ...]
    tables: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)
    divisions: dict[tuple[int, ...], Any] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return len(self.bounds) - 1


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

"""The cost of planning a decoding step to the host, and the device."""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.common.llama import DIM, KV_HEADS, LAYERS, SCALE
from benchmarks.gpu.contexts import DEVICE, DTYPE, queries
from benchmarks.gpu.timing import ROUNDS, graphed, seconds
from kvtier_kernels import CellKV, ListTables
from kvtier_kernels.lists import PAGE_CELLS
from kvtier_kernels.triton_backend.kernels import TritonKernels


def measure_planning(batch: int = 64, width: int = 128 << 10) -> dict[str, float]:
    """A plan of all layers, filled again for lists of up to so many entries."""
    kernels, columns = TritonKernels().lists, LAYERS * KV_HEADS
    rows = torch.arange(batch, device=DEVICE)
    dense = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
    pages = torch.zeros(batch, columns, dtype=torch.int32, device=DEVICE)
    tables = ListTables(pages.long(), pages, dense[:, None])
    asked = tables, rows, dense, LAYERS, KV_HEADS
    first = kernels.plan(*asked)
    # The first decode, for which there are no entries yet, decides what is planned.
    cells = torch.zeros(1, DIM, device=DEVICE, dtype=DTYPE)
    kernels.decode(queries(batch), CellKV(cells, cells, 1), first, 0, SCALE)
    pages.random_(width // PAGE_CELLS)

    def plan() -> None:
        kernels.plan(*asked, into=first)

    plan()
    torch.cuda.synchronize()
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        plan()
        taken.append(time.perf_counter() - began)
        torch.cuda.synchronize()
    return {
        "host_us": statistics.median(taken) * 1e6,
        "replayed_us": seconds(graphed([plan])) * 1e6,
    }


__all__ = ["measure_planning"]

"""What planning a decoding step costs the host, and the device."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.common.llama import KV_HEADS
from benchmarks.gpu.timing import ROUNDS, graphed, seconds
from kvtier_kernels.triton_backend.kernels import TritonKernels
from kvtier_kernels.triton_backend.launching import launch
from kvtier_kernels.triton_backend.planning.plans import schedule_for


def empty_plan(kernels: TritonKernels, batch: int, width: int) -> Any:
    slots = torch.empty(batch * width, dtype=torch.int32, device="cuda")
    return kernels.empty_plan(slots, batch, voted=False)


def measure_planning(batch: int = 64, width: int = 128 << 10) -> dict[str, float]:
    """What a decoding step of both classes costs the host, and the device."""
    kernels, slots = TritonKernels(), batch * width // 2
    table = torch.randint(1, slots, (batch, width), dtype=torch.int32, device="cuda")
    rows = torch.arange(batch, device="cuda")
    lengths = torch.full((batch,), width // 2, device="cuda")
    # One token in a hundred has a slot of locality heads.
    image = torch.arange(slots, device="cuda")
    image[torch.rand(slots, device="cuda") > 0.01] = 0
    plans = [empty_plan(kernels, batch, width) for _ in range(2)]
    for into, heads in zip(plans, (2, KV_HEADS - 2), strict=True):
        schedule_for(launch, into, heads)

    def plan() -> None:
        for into, one in zip(plans, (None, image), strict=True):
            kernels.plan_on_device(table, rows, lengths, width, one, into=into)

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


__all__ = ["empty_plan", "measure_planning"]

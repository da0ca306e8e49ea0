"""The same decodes by the backend `flashinfer`, whose kernels are compiled on the way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common.llama import SCALE
from benchmarks.gpu.head_classes import (
    HeadClass,
    Shape,
    both_classes,
    layer_seconds,
    queries,
)
from benchmarks.gpu.timing import ROUNDS
from kvtier_kernels import AttentionKernels, KernelUnavailableError, get_kernels
from kvtier_kernels.triton_backend.kernels import TritonKernels


def measure_flashinfer(shapes: Sequence[Shape], seed: int) -> dict[str, Any]:
    """The same decodes by the backend `flashinfer`, whose kernels are compiled on the way: how far
    its outputs are from Triton's, its times, and what planning a step costs the host."""
    try:
        kernels = get_kernels("flashinfer")
    except KernelUnavailableError as error:
        return {"ran": False, "missing": str(error)}
    rows = []
    for shape in shapes:
        row: dict[str, Any] = {"shape": str(shape)}
        for name, voted in (("retained", False), ("voted", True)):
            triton_classes = both_classes(TritonKernels(), shape, seed, voted=voted)
            classes = [one.planned_by(kernels) for one in triton_classes]
            worst = (
                _difference(kernels, *pair, shape.batch)
                for pair in zip(classes, triton_classes, strict=True)
            )
            row[f"{name}_difference"] = max(worst)
            row[f"{name}_s"] = layer_seconds(kernels, classes, shape.batch)
            if not voted:
                row["planning_us"] = _planning_us(kernels, classes, shape.batch)
            del triton_classes, classes
            torch.cuda.empty_cache()
        rows.append(row)
    return {"ran": True, "decode": rows}


def _difference(
    kernels: AttentionKernels, one: HeadClass, by_triton: HeadClass, batch: int
) -> float:
    q = queries(batch, one.heads)
    got = kernels.decode(q, one.layers[0], one.plan, SCALE).o
    known = TritonKernels().decode(q, one.layers[0], by_triton.plan, SCALE).o
    return float((got.float() - known.float()).abs().max())


def _planning_us(kernels: AttentionKernels, classes: Sequence[HeadClass], batch: int) -> float:
    """Host time of a step's first layer, which plans, above that of another."""
    queries = [queries(batch, one.heads) for one in classes]
    taken: dict[bool, list[float]] = {True: [], False: []}
    for anew in [True, False] * ROUNDS:
        torch.cuda.synchronize()
        began = time.perf_counter()
        if anew:
            classes = [one.planned_by(kernels) for one in classes]
        for q, one in zip(queries, classes, strict=True):
            kernels.decode(q, one.layers[0], one.plan, SCALE)
        taken[anew].append(time.perf_counter() - began)
    return (statistics.median(taken[True]) - statistics.median(taken[False])) * 1e6


__all__ = ["measure_flashinfer"]

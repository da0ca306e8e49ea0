"""The same decodes by the backend `flashinfer`, whose kernels are compiled on the way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu.contexts import Shape, layer_seconds, queries, retained
from benchmarks.gpu.lists import Contexts
from benchmarks.gpu.llama import SCALE
from benchmarks.gpu.timing import ROUNDS
from kvtier_kernels import AttentionKernels, KernelUnavailableError, get_kernels
from kvtier_kernels.triton_backend.kernels import TritonKernels


def measure_flashinfer(shapes: Sequence[Shape], seed: int) -> dict[str, Any]:
    """The same decodes by the backend `flashinfer`, whose kernels are compiled on the way: how far
    its outputs are from Triton's, its times, and what planning a layer costs the host."""
    try:
        kernels = get_kernels("flashinfer")
    except KernelUnavailableError as error:
        return {"ran": False, "missing": str(error)}
    rows = []
    for shape in shapes:
        row: dict[str, Any] = {"shape": str(shape)}
        for name, voted in (("retained", False), ("voted", True)):
            contexts = retained(shape, shape.lengths(seed), seed, voted=voted)
            row[f"{name}_difference"] = _difference(kernels, contexts)
            row[f"{name}_s"] = layer_seconds(kernels, contexts)
            if not voted:
                row["planning_us"] = _planning_us(kernels, contexts)
            del contexts
            torch.cuda.empty_cache()
        rows.append(row)
    return {"ran": True, "decode": rows}


def _difference(kernels: AttentionKernels, contexts: Contexts) -> float:
    q = queries(contexts.requests)
    got, known = (
        each.lists.decode(q, contexts.kv, contexts.planned_by(each), 0, SCALE).o.float()
        for each in (kernels, TritonKernels())
    )
    return float((got - known).abs().max())


def _planning_us(kernels: AttentionKernels, contexts: Contexts) -> float:
    """Host time of a step's first layer, which plans for itself, above that of a layer that has
    been planned. Lists in pages are known from the step before."""
    q, plan = queries(contexts.requests), contexts.planned_by(kernels)
    taken: dict[bool, list[float]] = {True: [], False: []}
    for anew in [True, False] * ROUNDS:
        torch.cuda.synchronize()
        began = time.perf_counter()
        if anew:
            plan = contexts.planned_by(kernels, into=plan)
        kernels.lists.decode(q, contexts.kv, plan, 0, SCALE)
        taken[anew].append(time.perf_counter() - began)
    return (statistics.median(taken[True]) - statistics.median(taken[False])) * 1e6

"""One layer's decode: what is retained, the same with votes, and full KV; and the cost of planning
a decoding step to the host, and the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu.contexts import DEVICE, DTYPE, Shape, full, layer_seconds, queries, retained
from benchmarks.gpu.lists import Contexts
from benchmarks.gpu.llama import DIM, GROUP, KV_HEADS, LAYERS, SCALE
from benchmarks.gpu.timing import ROUNDS, graphed, seconds
from kvtier_kernels import CellKV, ListTables
from kvtier_kernels.lists import PAGE_CELLS
from kvtier_kernels.triton_backend.kernels import TritonKernels


def measure_decode(shape: Shape, seed: int, *, flashinfer: bool) -> dict[str, Any]:
    """One layer of a batch: retained KV, the same with votes, and full KV, which is FlashInfer's
    where that was asked for and runs."""
    kernels = TritonKernels()
    lengths = shape.lengths(seed)
    found: dict[str, Any] = {"shape": str(shape), "lengths": lengths}
    for name, voted in (("retained", False), ("voted", True)):
        contexts = retained(shape, lengths, seed, voted=voted)
        found[f"{name}_s"] = layer_seconds(kernels, contexts)
        found["retained_bytes"] = contexts.num_bytes
        del contexts
        torch.cuda.empty_cache()
    whole = full(lengths, seed)
    found["full_bytes"] = whole.num_bytes
    found["full_triton_s"] = layer_seconds(kernels, whole)
    found |= {"full_kernel": "triton", "full_s": found["full_triton_s"]}
    if flashinfer:
        try:
            found |= {"full_s": flashinfer_seconds(whole, lengths), "full_kernel": "flashinfer"}
        except Exception as error:
            # FlashInfer is not installed, or compiled by no nvcc: what else was measured still
            # counts.
            found["flashinfer_missing"] = f"{type(error).__name__}: {error}"
    return found


def flashinfer_seconds(whole: Contexts, lengths: Sequence[int]) -> float:
    """FlashInfer's decode over all heads, planned before. FA2, which splits KV and has a group's
    queries in one tile; FA3 does neither."""
    import flashinfer

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=True, backend="fa2"
    )
    indptr = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    slots = torch.cat([row[:n] for row, n in zip(whole.tables.slots, lengths, strict=True)])
    wrapper.plan(
        indptr,
        slots,
        torch.ones(len(lengths), dtype=torch.int32, device=DEVICE),
        KV_HEADS * GROUP,
        KV_HEADS,
        DIM,
        1,
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
    )
    q = queries(len(lengths)).flatten(1, 2)
    # [layers, slots, 1, heads, dim]: a page is a slot.
    shape = (whole.layers, KV_HEADS, -1, 1, DIM)
    k, v = (x.view(shape).permute(0, 2, 3, 1, 4) for x in (whole.kv.k, whole.kv.v))

    def layers() -> None:
        for cache in zip(k, v, strict=True):
            wrapper.run(q, cache)

    return seconds(graphed([layers])) / whole.layers


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

"""One layer's decode: what is retained, the same with votes, and full KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common.llama import DIM, GROUP, KV_HEADS
from benchmarks.gpu.head_classes import (
    DTYPE,
    HeadClass,
    Shape,
    both_classes,
    layer_seconds,
    make_class,
    queries,
)
from benchmarks.gpu.timing import graphed, seconds
from kvtier_kernels.triton_backend.kernels import TritonKernels


def measure_decode(shape: Shape, seed: int, *, flashinfer: bool) -> dict[str, Any]:
    """One layer of a batch: retained KV, the same with votes, and full KV, which is FlashInfer's
    where that was asked for and runs."""
    kernels = TritonKernels()
    lengths = shape.lengths(seed)
    found: dict[str, Any] = {"shape": str(shape), "lengths": lengths}
    for name, voted in (("retained", False), ("voted", True)):
        classes = both_classes(kernels, shape, seed, voted=voted)
        found[f"{name}_s"] = layer_seconds(kernels, classes, shape.batch)
        found["retained_bytes"] = sum(one.num_bytes for one in classes)
        del classes
        torch.cuda.empty_cache()
    full = make_class(kernels, lengths, KV_HEADS, seed)
    found["full_bytes"] = full.num_bytes
    found["full_triton_s"] = layer_seconds(kernels, [full], shape.batch)
    found |= {"full_kernel": "triton", "full_s": found["full_triton_s"]}
    if flashinfer:
        try:
            found |= {"full_s": flashinfer_seconds(full, lengths), "full_kernel": "flashinfer"}
        except Exception as error:
            # Not installed, or compiled by no nvcc: what else was measured still counts.
            found["flashinfer_missing"] = f"{type(error).__name__}: {error}"
    return found


def flashinfer_seconds(full: HeadClass, lengths: Sequence[int]) -> float:
    """FlashInfer's decode over all heads, planned before. FA2, which splits KV and has a group's
    queries in one tile; FA3 does neither."""
    import flashinfer

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=True, backend="fa2"
    )
    pages = torch.ones(len(lengths), dtype=torch.int32, device="cuda")
    wrapper.plan(
        full.plan.indptr,
        full.plan.slots,
        pages,
        KV_HEADS * GROUP,
        KV_HEADS,
        DIM,
        1,
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
    )
    q = queries(len(lengths), KV_HEADS).flatten(1, 2)
    caches = [(kv.k.unsqueeze(1), kv.v.unsqueeze(1)) for kv in full.layers]

    def layers() -> None:
        for cache in caches:
            wrapper.run(q, cache)

    return seconds(graphed([layers])) / len(caches)


__all__ = ["measure_decode"]

"""What `benchmarks.gpu.check --peers` measures: the same decodes by others' kernels, on this GPU.

compactor-vllm's is tuned for every shape, which it is not by itself, and replayed as a graph, like
ours. kvpress's asks the host in every call and has one context at a time, so it and ours are called
as they are, for batches of one.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.llama import KV_HEADS, SCALE
from benchmarks.common.peer_kernels import (
    COMPACTOR_FILE,
    KVPRESS_FILE,
    CompactorVllm,
    Held,
    Kvpress,
    decode_classes,
    load_peer,
    to_masked,
    to_pages,
)
from benchmarks.gpu.head_classes import (
    HeadClass,
    Shape,
    both_classes,
    layer_seconds,
    queries,
)
from benchmarks.gpu.timing import graphed, seconds
from kvtier_kernels.triton_backend.kernels import TritonKernels


def measure_peers(shapes: Sequence[Shape], seed: int, peers: Path) -> dict[str, Any]:
    """Rows by peer; one that is not there, or does not run, is in `missing`."""
    found: dict[str, Any] = {"missing": {}}
    measures: dict[str, Callable[[], Any]] = {
        "compactor_vllm": lambda: _compactor(load_peer(peers, COMPACTOR_FILE), shapes, seed),
        "kvpress": lambda: _kvpress(load_peer(peers, KVPRESS_FILE), shapes, seed),
    }
    for name, measure in measures.items():
        try:
            found[name] = measure()
        except Exception as error:
            # Code of others, written for other versions: it may fail in any way.
            traceback.print_exc()
            found["missing"][name] = f"{type(error).__name__}: {error}".splitlines()[0]
        torch.cuda.empty_cache()
    return found


def _held(classes: Sequence[HeadClass], layer: int) -> list[Held]:
    return [Held(one.layers[layer % len(one.layers)], one.slots, one.indptr) for one in classes]


def _ours(kernels: TritonKernels, q: torch.Tensor, classes: Sequence[HeadClass]) -> torch.Tensor:
    """Our output for the first layer."""
    kv, plans = [one.layers[0] for one in classes], [one.plan for one in classes]
    return decode_classes(kernels, q, kv, plans, SCALE)


def _compactor(module: Any, shapes: Sequence[Shape], seed: int) -> list[dict[str, Any]]:
    kernels, rows = TritonKernels(), []
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    tuner = module._varkv_stage1_groupM
    tuner.cache_results = False
    for shape in shapes:
        tuner.cache.clear()
        classes = both_classes(kernels, shape, seed, voted=False)
        layers = max(len(one.layers) for one in classes)
        caches = [to_pages(_held(classes, layer), seed) for layer in range(layers)]
        peer = CompactorVllm(module, caches[0], processors)
        q = queries(shape.batch, KV_HEADS)
        difference = peer.decode(q, caches[0], SCALE).float() - _ours(kernels, q, classes).float()
        calls = [partial(peer.decode, q, cache, SCALE) for cache in caches]
        rows.append(
            {
                "shape": str(shape),
                "difference": float(difference.abs().max()),
                "theirs_s": seconds(graphed(calls)) / layers,
                "ours_s": layer_seconds(kernels, classes, shape.batch),
            }
        )
        del classes, caches, peer, calls
        torch.cuda.empty_cache()
    return rows


def _kvpress(module: Any, shapes: Sequence[Shape], seed: int) -> list[dict[str, Any]]:
    kernels, peer, rows = TritonKernels(), Kvpress(module), []
    for shape in (one for one in shapes if one.batch == 1):
        classes = both_classes(kernels, shape, seed, voted=False)
        (tokens,) = shape.lengths(seed)
        masked = to_masked(_held(classes, 0), tokens)
        q = queries(1, KV_HEADS)
        difference = peer.decode(q, masked, SCALE).float() - _ours(kernels, q, classes).float()
        rows.append(
            {
                "shape": str(shape),
                "context_tokens": tokens,
                "difference": float(difference.abs().max()),
                "theirs_s": seconds(partial(peer.decode, q, masked, SCALE)),
                "ours_s": seconds(partial(_ours, kernels, q, classes)),
            }
        )
        del classes, masked
        torch.cuda.empty_cache()
    return rows


__all__ = ["measure_peers"]

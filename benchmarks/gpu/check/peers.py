"""The part of `benchmarks.gpu.check --peers` that measures the same decodes by others' kernels, on
this GPU.

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

from benchmarks.gpu.check.peer_kernels import (
    COMPACTOR_FILE,
    KVPRESS_FILE,
    CompactorVllm,
    Kvpress,
    load_peer,
    to_masked,
    to_pages,
)
from benchmarks.gpu.contexts import Shape, layer_seconds, queries, retained
from benchmarks.gpu.lists import Contexts
from benchmarks.gpu.llama import SCALE
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


def _ours(kernels: TritonKernels, q: torch.Tensor, contexts: Contexts, plan: Any) -> torch.Tensor:
    """Our output for the first layer."""
    return kernels.lists.decode(q, contexts.kv, plan, 0, SCALE).o


def _compactor(module: Any, shapes: Sequence[Shape], seed: int) -> list[dict[str, Any]]:
    kernels, rows = TritonKernels(), []
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    tuner = module._varkv_stage1_groupM
    tuner.cache_results = False
    for shape in shapes:
        tuner.cache.clear()
        contexts = retained(shape, shape.lengths(seed), seed)
        plan = contexts.planned_by(kernels)
        caches = [to_pages(contexts, layer, seed) for layer in range(contexts.layers)]
        peer = CompactorVllm(module, caches[0], processors)
        q = queries(shape.batch)
        theirs, ours = peer.decode(q, caches[0], SCALE), _ours(kernels, q, contexts, plan)
        calls = [partial(peer.decode, q, cache, SCALE) for cache in caches]
        rows.append(
            {
                "shape": str(shape),
                "difference": float((theirs.float() - ours.float()).abs().max()),
                "theirs_s": seconds(graphed(calls)) / contexts.layers,
                "ours_s": layer_seconds(kernels, contexts, plan),
            }
        )
        del contexts, plan, caches, peer, calls
        torch.cuda.empty_cache()
    return rows


def _kvpress(module: Any, shapes: Sequence[Shape], seed: int) -> list[dict[str, Any]]:
    kernels, peer, rows = TritonKernels(), Kvpress(module), []
    for shape in (one for one in shapes if one.batch == 1):
        (tokens,) = lengths = shape.lengths(seed)
        contexts = retained(shape, lengths, seed)
        plan, masked = contexts.planned_by(kernels), to_masked(contexts, tokens)
        q = queries(1)
        theirs, ours = peer.decode(q, masked, SCALE), _ours(kernels, q, contexts, plan)
        rows.append(
            {
                "shape": str(shape),
                "context_tokens": tokens,
                "difference": float((theirs.float() - ours.float()).abs().max()),
                "theirs_s": seconds(partial(peer.decode, q, masked, SCALE)),
                "ours_s": seconds(partial(_ours, kernels, q, contexts, plan)),
            }
        )
        del contexts, plan, masked
        torch.cuda.empty_cache()
    return rows

"""The part of `benchmarks.gpu.check` that measures choosing: all layers of one long context, on
this GPU.

What is chosen and merged is in choosing_context.py. Prefill attention is by every kernel that
is here, and the fastest counts. Times are the device's, by events, for all layers. One layer's
attention is measured and the layers are counted, because they do the same; choosing is run for
every layer, so that launching shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.check.choosing_context import (
    Context,
    attend,
    make_context,
    make_parts,
    merge,
    select,
)
from benchmarks.gpu.contexts import DTYPE
from benchmarks.gpu.llama import LAYERS, SCALE
from benchmarks.gpu.timing import seconds
from kvtier.retention.keepkv import KeepKV
from kvtier.retention.scorers.compactor import Compactor
from kvtier_kernels import RaggedKV
from kvtier_kernels.triton_backend.kernels import TritonKernels

CONTEXT, ROUNDS = 128 << 10, 3
# The chunk of a prefill by our own kernel.
CHUNK_TOKENS = 8192


def prefill_calls(context: Context) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Causal attention of the whole context, by name."""

    def by(backend: SDPBackend) -> None:
        with sdpa_kernel(backend):
            attend(context.q, context.k, context.v, causal=True)

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        yield f"torch {backend.name}", partial(by, backend)
    kernels = TritonKernels()
    kv = RaggedKV(context.k, context.v)
    slots = torch.arange(context.tokens, device=context.k.device)

    def own() -> None:
        for begin in range(0, context.tokens, CHUNK_TOKENS):
            rows = slice(begin, min(begin + CHUNK_TOKENS, context.tokens))
            new = (context.q[rows], context.k[rows], context.v[rows])
            plan = kernels.plan(slots, [0, begin])
            kernels.extend(*new, [0, len(new[0])], kv, plan, SCALE)

    yield "kvtier triton", own


def measure_prefill(context: Context) -> dict[str, Any]:
    """Seconds of all layers by kernel, and which was the fastest."""
    found: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name, call in prefill_calls(context):
        try:
            found[name] = LAYERS * seconds(call, ROUNDS)
        except Exception as error:
            # The kernel is not built in, or not for this GPU; Triton and torch raise all kinds.
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    if not found:
        raise RuntimeError(f"no kernel computes the prefill's attention: {missing}")
    fastest = min(found, key=lambda name: found[name])
    return {
        "prefill_s": found[fastest],
        "prefill_kernel": fastest,
        "prefills_s": found,
        "prefills_missing": missing,
    }


def measure_choosing(seed: int) -> dict[str, Any]:
    """Everything in the module's docstring, and the parts that it is made of."""
    context = make_context(seed, CONTEXT, DTYPE, "cuda")
    found = measure_prefill(context)
    compactor, keepkv = Compactor(), KeepKV()
    for name, call in (
        ("selection", lambda: select(context, compactor)),
        ("merge", lambda: merge(context, keepkv)),
    ):
        found[f"{name}_s"] = seconds(partial(in_every_layer, call), ROUNDS)
        found[f"{name}_waits"] = waits(call)
    parts = make_parts(context).items()
    return found | {"parts_s": {name: seconds(call, ROUNDS) for name, call in parts}}


def in_every_layer(call: Callable[[], Any]) -> None:
    for _ in range(LAYERS):
        call()


def waits(call: Callable[[], Any]) -> int:
    """Return how often the host waits for the device in a call."""
    with warnings.catch_warnings(record=True) as caught, _sync_debugging():
        warnings.simplefilter("always")
        call()
    return sum("called a synchronizing" in str(one.message) for one in caught)


@contextmanager
def _sync_debugging() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)

"""What `benchmarks.gpu_check` measures of choosing: all layers of one long context, on this GPU.

    prefill     causal attention of the context, by every kernel that is here; the fastest counts
    selection   Compactor: window mass, leverage of rotated keys, the best quarter of each head
    merge       KeepKV: prediction from 32 queries, the best quarter, the rest merged into it

Times are the device's, by events, for all layers. One layer's attention is measured and the layers
are counted, because they do the same; choosing is run for every layer, so that launching shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_check_measures import (
    DIM,
    DTYPE,
    GROUP,
    KV_HEADS,
    LAYERS,
    SCALE,
    seconds,
)
from kvtier.retention.compactor import Compactor
from kvtier.retention.keepkv import KeepKV, QueryWindow
from kvtier_kernels import RaggedKV
from kvtier_kernels.merging import assign, exact_entries, merge_beta
from kvtier_kernels.scores import Rotation, leverage_scores, window_mass
from kvtier_kernels.triton_backend.kernels import TritonKernels

CONTEXT, KEPT, ROUNDS = 128 << 10, 0.25, 3
# Of a prefill by our own kernel.
CHUNK_TOKENS = 8192
# Keys that are alike: what merging is about. Their cosine is 0.92, above the floor of 0.9.
ALIKE, NOISE = 8, 0.3


@dataclass(frozen=True)
class Context:
    """One layer. q `[tokens, heads, group, dim]`; k, v `[tokens, heads, dim]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rotation: Rotation

    @property
    def tokens(self) -> int:
        return self.k.shape[0]

    @property
    def count(self) -> int:
        """Entries that a head keeps."""
        return int(KEPT * self.tokens)


def make_context(seed: int, tokens: int = CONTEXT, device: str = "cuda") -> Context:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=DTYPE)

    centres = normal(max(1, tokens // ALIKE), KV_HEADS, DIM)
    which = torch.randint(len(centres), (tokens,), generator=generator, device=device)
    angles = torch.arange(tokens, device=device)[:, None] * torch.logspace(
        0, -4, DIM // 2, device=device
    )
    return Context(
        normal(tokens, KV_HEADS, GROUP, DIM),
        centres[which] + NOISE * normal(tokens, KV_HEADS, DIM),
        normal(tokens, KV_HEADS, DIM),
        Rotation(angles.cos(), angles.sin()),
    )


def select(context: Context, rule: Compactor) -> torch.Tensor:
    """As a server does it: mass while prefilling, the rest when the turn ends."""
    bounds, width = [0, context.tokens], rule.window_tokens
    mass = window_mass(context.q, context.k, bounds, [0], SCALE, width)
    mass = mass * torch.linalg.vector_norm(context.v, dim=-1, dtype=torch.float32).T
    scores = rule.scores(context.k.transpose(0, 1), mass, context.rotation)
    return rule.select(scores, context.count)


def merge(context: Context, rule: KeepKV) -> torch.Tensor:
    """As a refresh does it."""
    keys, values = context.k.transpose(0, 1), context.v.transpose(0, 1)
    window = QueryWindow(context.q[-rule.window_queries :], SCALE)
    return rule.retain(keys, values, context.count, window=window).entries.k


def prefill_calls(context: Context) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Causal attention of the whole context, by name."""
    q = context.q.flatten(1, 2).transpose(0, 1).unsqueeze(0)
    k, v = (x.transpose(0, 1).unsqueeze(0) for x in (context.k, context.v))

    def sdpa(backend: SDPBackend) -> None:
        with sdpa_kernel(backend):
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        yield f"torch {backend.name}", lambda backend=backend: sdpa(backend)
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
            # Not built in, or not for this GPU; Triton and torch raise all kinds.
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    fastest = min(found, key=lambda name: found[name])
    return {
        "prefill_s": found[fastest],
        "prefill_kernel": fastest,
        "prefills_s": found,
        "prefills_missing": missing,
    }


def measure_choosing(seed: int) -> dict[str, Any]:
    """Everything in the module's docstring, and the parts that it is made of."""
    context = make_context(seed)
    found = measure_prefill(context)
    compactor, keepkv = Compactor(), KeepKV()
    for name, call in (
        ("selection", lambda: select(context, compactor)),
        ("merge", lambda: merge(context, keepkv)),
    ):
        found[f"{name}_s"] = seconds(lambda call=call: [call() for _ in range(LAYERS)], ROUNDS)
        found[f"{name}_peak_bytes"] = peak_bytes(call)
        found[f"{name}_waits"] = waits(call)
    return found | {"parts_s": measure_parts(context)}


def measure_parts(context: Context) -> dict[str, float]:
    """Seconds of one layer: where to look when a bar is missed."""
    keys, values = context.k.transpose(0, 1), context.v.transpose(0, 1)
    entries, policy = exact_entries(keys, values), KeepKV()
    bounds, width = [0, context.tokens], Compactor().window_tokens
    window = QueryWindow(context.q[-policy.window_queries :], SCALE)
    logits_of = policy.prediction(entries, window)
    logits = logits_of(keys)
    worth = policy.worth(entries, logits)
    kept = worth.topk(context.count, dim=-1).indices.sort(dim=-1).values
    assignment = assign(keys, kept, floor=policy.floor)
    calls: dict[str, Callable[[], Any]] = {
        "window mass": lambda: window_mass(context.q, context.k, bounds, [0], SCALE, width),
        "leverage": lambda: leverage_scores(keys, context.rotation),
        "top-k": lambda: worth.topk(context.count, dim=-1, sorted=False),
        "prediction": lambda: policy.prediction(entries, window)(keys),
        "assign": lambda: assign(keys, kept, floor=policy.floor),
        "merge": lambda: merge_beta(entries, logits, assignment, logits_of),
    }
    return {name: seconds(call, ROUNDS) for name, call in calls.items()}


def peak_bytes(call: Callable[[], Any]) -> int:
    """Memory that a call holds at most, beside what there was."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def waits(call: Callable[[], Any]) -> int:
    """How often the host waits for the device in a call."""
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


__all__ = ["make_context", "measure_choosing", "merge", "select"]

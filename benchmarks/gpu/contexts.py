"""Batches of contexts of Llama-3.1-8B's shape on this GPU, and the time of decoding over them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.lists import Contexts, make_contexts
from benchmarks.gpu.llama import DIM, GROUP, KV_HEADS, LAYERS, LOCALITY_ENTRIES, SCALE
from benchmarks.gpu.timing import graphed, seconds
from kvtier_kernels import AttentionKernels

DEVICE, DTYPE = "cuda", torch.bfloat16
SHORTEST, LONGEST = 8 << 10, 128 << 10
# KV is read again only after so many other bytes: more than an L2 cache holds.
ROTATED_BYTES = 512 << 20
# Neighbouring entries of a list.
RUN = 64
# Tokens of each context that nothing has compressed yet.
DENSE_TOKENS = 128


@dataclass(frozen=True)
class Shape:
    """A batch of contexts, and how many of the KV heads keep all of them."""

    batch: int
    ca_heads: int

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.ca_heads} of {KV_HEADS} CA heads"

    def lengths(self, seed: int) -> list[int]:
        """Tokens of each context, mixed: spread evenly over the logarithm of the lengths."""
        chance = random.Random(seed * 1000 + self.batch)
        ratio = LONGEST / SHORTEST
        return [int(SHORTEST * ratio ** chance.random()) for _ in range(self.batch)]


SHAPES = tuple(Shape(batch, heads) for batch in (1, 4, 16, 64) for heads in (2, 4))


def retained(shape: Shape, lengths: Sequence[int], seed: int, *, voted: bool = False) -> Contexts:
    """Context-anchored heads keep whole contexts, locality heads sinks and recent tokens: all of it
    in pages but the newest tokens. The heads of each layer take turns."""
    keeps_all = [head * 5 % KV_HEADS < shape.ca_heads for head in range(KV_HEADS)]
    of_head = [LONGEST if every else LOCALITY_ENTRIES for every in keeps_all]
    packed = [[min(most, length) - DENSE_TOKENS for most in of_head] for length in lengths]
    return _made(packed, [DENSE_TOKENS] * len(lengths), seed, voted=voted)


def full(lengths: Sequence[int], seed: int) -> Contexts:
    """Make contexts of which nothing is compressed."""
    return _made([[0] * KV_HEADS] * len(lengths), lengths, seed)


def _made(
    packed: Sequence[Sequence[int]], dense: Sequence[int], seed: int, *, voted: bool = False
) -> Contexts:
    """Make contexts of as many layers as no cache holds."""
    entries = sum(map(sum, packed)) + KV_HEADS * sum(dense)
    layers = -(-ROTATED_BYTES // (2 * entries * DIM * DTYPE.itemsize))
    return make_contexts(
        packed,
        dense,
        layers=min(layers, LAYERS),
        dim=DIM,
        dtype=DTYPE,
        device=DEVICE,
        seed=seed,
        voted=voted,
        run=RUN,
    )


def queries(batch: int) -> torch.Tensor:
    """Random queries of all heads: `[batch, KV_HEADS, GROUP, DIM]`."""
    return torch.randn(batch, KV_HEADS, GROUP, DIM, device=DEVICE, dtype=DTYPE)


def layer_seconds(kernels: AttentionKernels, contexts: Contexts, plan: Any = None) -> float:
    """The time of one layer's decode."""
    plan = contexts.planned_by(kernels) if plan is None else plan
    q, decode = queries(contexts.requests), kernels.lists.decode
    layers = range(contexts.layers)
    calls = [partial(decode, q, contexts.kv, plan, layer, SCALE) for layer in layers]
    return seconds(graphed(calls)) / contexts.layers

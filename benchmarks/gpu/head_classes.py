"""Batches of contexts whose heads hold different entries, and the time of decoding over them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.common.llama import DIM, GROUP, KV_HEADS, LAYERS, LOCALITY_ENTRIES, SCALE
from benchmarks.gpu.timing import graphed, seconds
from kvtier_kernels import AttentionKernels, HeadMap, RaggedKV
from kvtier_kernels.side_by_side import SideBySide

DTYPE = torch.bfloat16
SHORTEST, LONGEST = 8 << 10, 128 << 10
# KV is read again only after so many other bytes: more than an L2 cache holds.
ROTATED_BYTES = 512 << 20
# Neighbouring slots of a context.
RUN = 64


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


@dataclass
class HeadClass:
    """Heads that hold the same entries: their plan, and KV for as many layers as are rotated."""

    plan: Any
    layers: list[RaggedKV]
    slots: torch.Tensor
    indptr: list[int]
    heads: int

    @property
    def entries(self) -> int:
        return self.indptr[-1]

    @property
    def num_bytes(self) -> int:
        """The bytes of one layer's entries."""
        return self.entries * self.heads * DIM * DTYPE.itemsize * 2

    def planned_by(self, kernels: AttentionKernels) -> HeadClass:
        """The same entries, for another backend."""
        return replace(self, plan=kernels.plan(self.slots, self.indptr, self.layers[0].log_votes))


def make_class(
    kernels: Any,
    lengths: Sequence[int],
    heads: int,
    seed: int,
    *,
    voted: bool = False,
    layers: int = LAYERS,
) -> HeadClass:
    """Random KV of as many layers as no cache holds, `layers` at most."""
    entries = sum(lengths)
    generator = torch.Generator("cuda").manual_seed(seed)
    # A context's slots lie together, mostly, as an allocator leaves them.
    runs = torch.randperm(entries // RUN, generator=generator, device="cuda") * RUN
    slots = (runs[:, None] + torch.arange(RUN, device="cuda")).flatten()
    slots = torch.cat([slots, torch.arange(slots.numel(), entries, device="cuda")])
    one = entries * heads * DIM * DTYPE.itemsize * 2
    made = []
    votes = torch.rand(entries, generator=generator, device="cuda") if voted else None
    for _ in range(max(1, min(layers, -(-ROTATED_BYTES // one)))):
        shape = (entries, heads, DIM)
        k, v = (torch.randn(shape, generator=generator, device="cuda", dtype=DTYPE) for _ in "kv")
        made.append(RaggedKV(k, v, votes))
    indptr = [0, *itertools.accumulate(lengths)]
    return HeadClass(kernels.plan(slots, indptr, votes), made, slots, indptr, heads)


def queries(batch: int, heads: int) -> torch.Tensor:
    """Random queries of so many KV heads: `[batch, heads, GROUP, DIM]`."""
    return torch.randn(batch, heads, GROUP, DIM, device="cuda", dtype=DTYPE)


def layer_seconds(kernels: Any, classes: Sequence[HeadClass], batch: int) -> float:
    """The time of one layer's decode over all classes, whose heads take turns, as a server does
    it: every class reads its heads of the queries where they are, and they run side by side."""
    layers = max(len(one.layers) for one in classes)
    total = sum(one.heads for one in classes)
    maps = head_maps([one.heads for one in classes])
    q = queries(batch, total)
    out = torch.empty_like(q)
    streams = SideBySide("cuda")

    def layer(index: int) -> None:
        decodes = []
        for heads, one in zip(maps, classes, strict=True):
            kv = one.layers[index % len(one.layers)]
            decodes.append(partial(kernels.decode_heads, q, kv, one.plan, SCALE, heads, out))
        streams.run(decodes)

    calls = [partial(layer, index) for index in range(layers)]
    return seconds(graphed(calls)) / layers


def head_maps(counts: Sequence[int]) -> list[HeadMap]:
    """So many heads for each class, which do not lie together where there are several."""
    owners = sorted(range(sum(counts)), key=lambda head: (head * 5) % 8)
    maps, taken = [], 0
    for count in counts:
        heads = tuple(sorted(owners[taken : taken + count]))
        maps.append(HeadMap(heads, torch.tensor(heads, device="cuda")))
        taken += count
    return maps


def both_classes(kernels: Any, shape: Shape, seed: int, *, voted: bool) -> list[HeadClass]:
    """Context-anchored heads over whole contexts, locality heads over what they keep of them."""
    lengths = shape.lengths(seed)
    local = [min(length, LOCALITY_ENTRIES) for length in lengths]
    return [
        make_class(kernels, lengths, shape.ca_heads, seed, voted=voted),
        make_class(kernels, local, KV_HEADS - shape.ca_heads, seed, voted=voted),
    ]


__all__ = [
    "DTYPE",
    "RUN",
    "SHAPES",
    "HeadClass",
    "Shape",
    "both_classes",
    "layer_seconds",
    "make_class",
    "queries",
]

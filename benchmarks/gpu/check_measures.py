"""What `benchmarks.gpu.check` measures, over tensors that it makes itself."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.cost.choosing_context import DIM, GROUP, KV_HEADS, LAYERS, LOCALITY_ENTRIES, SCALE
from kvtier_kernels import (
    AttentionKernels,
    HeadMap,
    KernelUnavailableError,
    RaggedKV,
    get_kernels,
)
from kvtier_kernels.side_by_side import SideBySide
from kvtier_kernels.triton_backend.kernels import TritonKernels
from kvtier_kernels.triton_backend.launching import launch
from kvtier_kernels.triton_backend.planning.plans import schedule_for

DTYPE = torch.bfloat16
SHORTEST, LONGEST = 8 << 10, 128 << 10
# KV is read again only after so many other bytes: more than an L2 cache holds.
ROTATED_BYTES = 512 << 20
# Neighbouring slots of a context.
RUN = 64
ROUNDS = 20


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


@triton.jit
def _read(x, sums, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * BLOCK * STEPS
    acc = tl.zeros([BLOCK], tl.int32)
    for step in range(STEPS):
        acc += tl.load(x + begin + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(acc, 0))


def read_bandwidth(num_bytes: int = 4 << 30) -> float:
    """Bytes per second that a kernel reads which does nothing else."""
    block, steps = 4096, 8
    programs = num_bytes // 4 // (block * steps)
    # Not zeros, which a memory might tell from data.
    x = torch.randint(1 << 30, (programs * block * steps,), dtype=torch.int32, device="cuda")
    sums = torch.empty(programs, dtype=torch.int32, device="cuda")
    return x.numel() * 4 / seconds(lambda: _read[(programs,)](x, sums, BLOCK=block, STEPS=steps))


def seconds(call: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """The device's median time of a call."""
    for _ in range(3):
        call()
    taken = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1000)
    return statistics.median(taken)


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


def graphed(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """All the calls as one CUDA graph."""
    for call in calls:
        call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def layer_seconds(kernels: Any, classes: Sequence[HeadClass], batch: int) -> float:
    """The time of one layer's decode over all classes, whose heads take turns, as a server does
    it: every class reads its heads of the queries where they are, and they run side by side."""
    layers = max(len(one.layers) for one in classes)
    total = sum(one.heads for one in classes)
    maps = head_maps([one.heads for one in classes])
    q = torch.randn(batch, total, GROUP, DIM, device="cuda", dtype=DTYPE)
    out = torch.empty_like(q)
    streams = SideBySide("cuda")

    def layer(index: int) -> None:
        streams.run(
            [
                partial(
                    kernels.decode_heads,
                    q,
                    one.layers[index % len(one.layers)],
                    one.plan,
                    SCALE,
                    heads,
                    out,
                )
                for heads, one in zip(maps, classes, strict=True)
            ]
        )

    calls = [lambda index=index: layer(index) for index in range(layers)]
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
    q = torch.randn(len(lengths), KV_HEADS * GROUP, DIM, device="cuda", dtype=DTYPE)
    caches = [(kv.k.unsqueeze(1), kv.v.unsqueeze(1)) for kv in full.layers]

    def layers() -> None:
        for cache in caches:
            wrapper.run(q, cache)

    return seconds(graphed([layers])) / len(caches)


def check_equal(shapes: Sequence[Shape], seed: int) -> dict[str, float]:
    """Largest difference of outputs: of each shape against the reference in float32, and of a
    replayed graph whose plan was made again for other lengths against an eager call."""
    kernels, reference = TritonKernels(), get_kernels("reference")
    found = {}
    for shape in shapes:
        # The reference is slow and wants float32 copies: a few thousand entries say as much.
        lengths = [length // 16 for length in shape.lengths(seed)]
        made = make_class(kernels, lengths, shape.ca_heads, seed, voted=True)
        q = torch.randn(shape.batch, shape.ca_heads, GROUP, DIM, device="cuda", dtype=DTYPE)
        kv = made.layers[0]
        got = kernels.decode(q, kv, made.plan, SCALE)
        exact = RaggedKV(kv.k.float(), kv.v.float(), kv.log_votes)
        indptr = [0, *itertools.accumulate(lengths)]
        plan = reference.plan(made.plan.slots, indptr, kv.log_votes)
        expected = reference.decode(q.float(), exact, plan, SCALE)
        found[str(shape)] = float((got.o.float() - expected.o).abs().max())
    found["graph, other lengths"] = check_graph(kernels, seed)
    return found


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


def _difference(kernels: Any, one: HeadClass, by_triton: HeadClass, batch: int) -> float:
    q = torch.randn(batch, one.heads, GROUP, DIM, device="cuda", dtype=DTYPE)
    got = kernels.decode(q, one.layers[0], one.plan, SCALE).o
    known = TritonKernels().decode(q, one.layers[0], by_triton.plan, SCALE).o
    return float((got.float() - known.float()).abs().max())


def _planning_us(kernels: Any, classes: Sequence[HeadClass], batch: int) -> float:
    """Host time of a step's first layer, which plans, above that of another."""
    queries = [
        torch.randn(batch, one.heads, GROUP, DIM, device="cuda", dtype=DTYPE) for one in classes
    ]
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


def check_graph(kernels: TritonKernels, seed: int) -> float:
    """A graph that plans and decodes, recorded at some lengths and replayed at others."""
    batch, width, heads = 4, 8192, 2
    generator = torch.Generator("cuda").manual_seed(seed)
    table = torch.randint(
        1, batch * width, (batch, width), generator=generator, device="cuda", dtype=torch.int32
    )
    rows = torch.arange(batch, device="cuda")
    lengths = torch.tensor([1, 8192, 77, 4000], device="cuda")
    k, v = (torch.randn(batch * width, heads, DIM, device="cuda", dtype=DTYPE) for _ in "kv")
    q = torch.randn(batch, heads, GROUP, DIM, device="cuda", dtype=DTYPE)
    plan = empty_plan(kernels, batch, width)
    outcome: list[torch.Tensor] = []

    def step() -> None:
        kernels.plan_on_device(table, rows, lengths, width, into=plan)
        outcome[:] = [kernels.decode(q, RaggedKV(k, v), plan, SCALE).o]

    replay = graphed([step])
    recorded = outcome[0]
    worst = 0.0
    for other in ([8192, 1, 5000, 300], [5, 6, 7, 8], [8192] * 4):
        lengths.copy_(torch.tensor(other))
        replay()
        slots = torch.cat([table[i, :n] for i, n in enumerate(other)]).long()
        fresh = kernels.plan(slots, [0, *itertools.accumulate(other)])
        known = kernels.decode(q, RaggedKV(k, v), fresh, SCALE).o
        worst = max(worst, float((recorded.float() - known.float()).abs().max()))
    return worst


def empty_plan(kernels: TritonKernels, batch: int, width: int) -> Any:
    slots = torch.empty(batch * width, dtype=torch.int32, device="cuda")
    return kernels.empty_plan(slots, batch, voted=False)


def measure_planning(batch: int = 64, width: int = 128 << 10) -> dict[str, float]:
    """What a decoding step of both classes costs the host, and the device."""
    kernels, slots = TritonKernels(), batch * width // 2
    table = torch.randint(1, slots, (batch, width), dtype=torch.int32, device="cuda")
    rows = torch.arange(batch, device="cuda")
    lengths = torch.full((batch,), width // 2, device="cuda")
    # One token in a hundred has a slot of locality heads.
    image = torch.arange(slots, device="cuda")
    image[torch.rand(slots, device="cuda") > 0.01] = 0
    plans = [empty_plan(kernels, batch, width) for _ in range(2)]
    for into, heads in zip(plans, (2, KV_HEADS - 2), strict=True):
        schedule_for(launch, into, heads)

    def plan() -> None:
        for into, one in zip(plans, (None, image), strict=True):
            kernels.plan_on_device(table, rows, lengths, width, one, into=into)

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


__all__ = [
    "DTYPE",
    "SHAPES",
    "HeadClass",
    "Shape",
    "both_classes",
    "check_equal",
    "graphed",
    "layer_seconds",
    "measure_decode",
    "measure_flashinfer",
    "measure_planning",
    "read_bandwidth",
    "seconds",
]

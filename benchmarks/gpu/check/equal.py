"""Whether the kernels are right on this device: against the reference, and as a CUDA graph."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from benchmarks.common.llama import DIM, SCALE
from benchmarks.gpu.check.planning import empty_plan
from benchmarks.gpu.head_classes import DTYPE, Shape, make_class, queries
from benchmarks.gpu.timing import graphed
from kvtier_kernels import RaggedKV, get_kernels
from kvtier_kernels.triton_backend.kernels import TritonKernels


def check_equal(shapes: Sequence[Shape], seed: int) -> dict[str, float]:
    """Largest difference of outputs: of each shape against the reference in float32, and of a
    replayed graph whose plan was made again for other lengths against an eager call."""
    kernels, reference = TritonKernels(), get_kernels("reference")
    found = {}
    for shape in shapes:
        # The reference is slow and wants float32 copies: a few thousand entries say as much.
        lengths = [length // 16 for length in shape.lengths(seed)]
        made = make_class(kernels, lengths, shape.ca_heads, seed, voted=True)
        q = queries(shape.batch, shape.ca_heads)
        kv = made.layers[0]
        got = kernels.decode(q, kv, made.plan, SCALE)
        exact = RaggedKV(kv.k.float(), kv.v.float(), kv.log_votes)
        indptr = [0, *itertools.accumulate(lengths)]
        plan = reference.plan(made.plan.slots, indptr, kv.log_votes)
        expected = reference.decode(q.float(), exact, plan, SCALE)
        found[str(shape)] = float((got.o.float() - expected.o).abs().max())
    found["graph, other lengths"] = check_graph(kernels, seed)
    return found


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
    q = queries(batch, heads)
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


__all__ = ["check_equal"]

"""A check that the kernels are right on this device: against the reference, and as a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.gpu.contexts import Shape, queries, retained
from benchmarks.gpu.llama import SCALE
from benchmarks.gpu.timing import graphed
from kvtier_kernels import get_kernels
from kvtier_kernels.triton_backend.kernels import TritonKernels


def check_equal(shapes: Sequence[Shape], seed: int) -> dict[str, float]:
    """Largest difference of outputs: of each shape against the reference in float32, and of a
    replayed graph that planned again for other lists against an eager call."""
    kernels, reference = TritonKernels(), get_kernels("reference")
    found = {}
    for shape in shapes:
        # The reference is slow and wants float32 copies: a few thousand entries say as much.
        lengths = [length // 16 for length in shape.lengths(seed)]
        made = retained(shape, lengths, seed, voted=True)
        q, last = queries(shape.batch), made.layers - 1
        got = kernels.lists.decode(q, made.kv, made.planned_by(kernels), last, SCALE)
        exact = made.kv._replace(k=made.kv.k.float(), v=made.kv.v.float())
        plan = made.planned_by(reference)
        expected = reference.lists.decode(q.float(), exact, plan, last, SCALE)
        found[str(shape)] = float((got.o.float() - expected.o).abs().max())
        del made, exact
        torch.cuda.empty_cache()
    found["graph, other lengths"] = check_graph(kernels, seed)
    return found


def check_graph(kernels: TritonKernels, seed: int) -> float:
    """A graph that plans and decodes, recorded at some lengths and replayed at others."""
    made = retained(Shape(4, 2), [8192] * 4, seed)
    q, last = queries(4), made.layers - 1
    plan = made.planned_by(kernels)
    outcome: list[torch.Tensor] = []

    def step() -> None:
        again = made.planned_by(kernels, into=plan)
        outcome[:] = [kernels.lists.decode(q, made.kv, again, last, SCALE).o]

    replay = graphed([step])
    recorded = outcome[0]
    pages, dense = made.tables.pages.clone(), made.dense.clone()
    worst = 0.0
    for shares in ((1.0, 0.0, 0.6, 0.03), (0.0, 0.0, 0.01, 0.0), (1.0, 1.0, 1.0, 1.0)):
        share = torch.tensor(shares, device=dense.device)
        made.tables.pages.copy_(pages * share[:, None])
        made.dense.copy_(dense * share)
        replay()
        fresh = made.planned_by(kernels)
        known = kernels.lists.decode(q, made.kv, fresh, last, SCALE).o
        worst = max(worst, float((recorded.float() - known.float()).abs().max()))
    return worst

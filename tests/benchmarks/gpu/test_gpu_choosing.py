"""The context on which choosing is measured: it gives merging something to do."""

from __future__ import annotations

import torch

from benchmarks.gpu.check.choosing_context import attend, make_context, merge, select
from kvtier.retention.keepkv import KeepKV
from kvtier.retention.scorers.compactor import Compactor
from kvtier_kernels import RaggedKV
from kvtier_kernels.merging import assign
from kvtier_kernels.reference_backend.kernels import ReferenceKernels


def small_context():
    return make_context(0, 512, torch.float32, "cpu")


def test_choosing_that_is_measured_merges_much_and_keeps_what_it_says():
    context = small_context()
    chosen = select(context, Compactor())
    assert chosen.shape == (8, 128)
    assert merge(context, KeepKV()).shape == (8, 128, 128)
    keys = context.k.transpose(0, 1)
    target = assign(keys, chosen, floor=KeepKV().floor).target
    assert (target >= 0).float().mean() > 0.5


def test_the_attention_that_choosing_is_compared_with_is_the_contexts():
    context = small_context()
    kernels, scale = ReferenceKernels(), context.q.shape[-1] ** -0.5
    plan = kernels.plan(torch.arange(512), [0, 0])
    expected = kernels.extend(
        context.q, context.k, context.v, [0, 512], RaggedKV(context.k, context.v), plan, scale
    ).o
    found = attend(context.q, context.k, context.v, causal=True)
    torch.testing.assert_close(found[0].transpose(0, 1), expected.flatten(1, 2))

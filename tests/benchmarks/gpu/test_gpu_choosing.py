"""The context on which choosing is measured, and the attention that it is compared with."""

from __future__ import annotations

import torch

from benchmarks.gpu.check.choosing_context import attend, make_context
from kvtier_kernels import RaggedKV
from kvtier_kernels.reference_backend.kernels import ReferenceKernels


def test_the_attention_that_choosing_is_compared_with_is_the_contexts():
    context = make_context(0, 512, torch.float32, "cpu")
    kernels, scale = ReferenceKernels(), context.q.shape[-1] ** -0.5
    plan = kernels.plan(torch.arange(512), [0, 0])
    expected = kernels.extend(
        context.q, context.k, context.v, [0, 512], RaggedKV(context.k, context.v), plan, scale
    ).o
    found = attend(context.q, context.k, context.v, causal=True)
    torch.testing.assert_close(found[0].transpose(0, 1), expected.flatten(1, 2))

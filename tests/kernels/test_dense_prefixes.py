"""Long prefixes by a library's attention, merged with what the Triton kernel computes."""

from itertools import accumulate

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from thorough import THOROUGH

from kvtier_kernels import RaggedKV, get_kernels
from kvtier_kernels.triton_backend.attention.dense import (
    DensePrefixes,
    cudnn_attention,
    has_cudnn_attention,
)
from kvtier_kernels.triton_backend.kernels import TritonKernels

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
BLOCKS, ROWS = (32, 16), 8
HEADS, GROUP, DIM, SCALE = 2, 2, 16, 0.25


class Counted:
    """Attention of every query over every entry, by its definition, and the shapes asked for."""

    def __init__(self):
        self.shapes = []

    def __call__(self, q, k, v, scale, *, causal):
        self.shapes.append((q.shape[0], k.shape[0], causal))
        logits = torch.einsum("tgd,nd->tgn", q, k) * scale
        if causal:
            later = torch.ones(len(q), len(k), device=q.device).triu(1).bool()
            logits.masked_fill_(later[:, None], float("-inf"))
        return torch.softmax(logits, -1) @ v, logits.logsumexp(-1)


def a_batch(prefixes, new, seed):
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=DEVICE)

    tokens, entries = sum(new), sum(prefixes)
    slots = torch.randperm(entries + 50, generator=generator, device=DEVICE)[:entries]
    kv = RaggedKV(normal(entries + 50, HEADS, DIM), normal(entries + 50, HEADS, DIM))
    q, k, v = normal(tokens, HEADS, GROUP, DIM), *normal(2, tokens, HEADS, DIM)
    q_indptr, indptr = ([0, *accumulate(lengths)] for lengths in (new, prefixes))
    return (q, k, v, q_indptr, kv), slots, indptr


@settings(max_examples=25 if THOROUGH else 5)
@given(
    requests=st.lists(st.tuples(st.integers(0, 100), st.integers(1, 20)), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
# Blocks of both sizes and a rest, too few tokens, too few entries; nothing for a library; nothing
# for the kernel; new tokens alone, and beside too few.
@example(requests=[(87, 20), (70, 5), (9, 6)], seed=0)
@example(requests=[(70, 5), (0, 1)], seed=0)
@example(requests=[(48, 6), (0, 9)], seed=0)
@example(requests=[(0, 8)], seed=3)
@example(requests=[(16, 8), (0, 2)], seed=3)
def test_a_division_does_not_change_what_is_computed(requests, seed):
    """New tokens are the library's where nothing else is left. The plan remembers its division, for
    the other layers of the step."""
    prefixes, new = zip(*requests, strict=True)
    arguments, slots, indptr = a_batch(prefixes, new, seed)
    known = get_kernels("reference")
    expected = known.extend(*arguments, known.plan(slots, indptr), SCALE)
    attend = Counted()
    kernels = TritonKernels(dense=DensePrefixes(attend, BLOCKS, ROWS))
    plan, shapes = kernels.plan(slots, indptr), set(kernels._dense.shapes(24, 100))
    long = [prefix for prefix, count in requests if 4 * count >= 3 * ROWS]
    whole = len(long) == len(requests) and not any(prefix % 16 for prefix in long)
    for layers in (1, 2):
        state = kernels.extend(*arguments, plan, SCALE)
        torch.testing.assert_close(state.o, expected.o, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(state.lse, expected.lse, atol=2e-5, rtol=1e-5)
        assert {(rows, 0 if causal else n) for rows, n, causal in attend.shapes} <= shapes
        asked = sum(entries for _, entries, causal in attend.shapes if not causal)
        assert asked == layers * HEADS * sum(prefix // 16 * 16 for prefix in long)
        alone = sum(causal for _, _, causal in attend.shapes)
        assert alone == layers * HEADS * (len(requests) if whole else 0)


def test_cudnn_is_asked_only_where_it_can_answer():
    half = torch.zeros(8, 2, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    wide = ON_GPU and torch.cuda.get_device_capability()[0] in (9, 10)
    assert has_cudnn_attention(half) == wide
    assert not has_cudnn_attention(half.float())


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("entries", [8192 + 16384 + 77, 8192, 0])
def test_a_prefill_of_real_size_by_cudnn_is_that_without_it(entries):
    if not has_cudnn_attention(torch.zeros(8, 2, 4, 128, dtype=torch.bfloat16, device=DEVICE)):
        pytest.skip("needs cuDNN's attention, of Hopper or later")
    torch.manual_seed(0)
    tokens = 3500
    q = torch.randn(tokens, 2, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    k, v = torch.randn(2, tokens, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    pool = torch.randn(2, 40000, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.randperm(40000, device=DEVICE)[:entries]
    kernels = TritonKernels(dense=DensePrefixes(cudnn_attention))
    nowhere = TritonKernels(dense=DensePrefixes(cudnn_attention, rows=1 << 20))
    found, expected = (
        one.extend(q, k, v, [0, tokens], RaggedKV(*pool), one.plan(slots, [0, entries]), 128**-0.5)
        for one in (kernels, nowhere)
    )
    torch.testing.assert_close(found.lse, expected.lse, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(found.o.float(), expected.o.float(), atol=2e-3, rtol=1e-2)

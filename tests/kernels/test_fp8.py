"""KV of one byte a number: what is stored, and that every backend attends to exactly that."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_equivalence import (  # noqa: F401
    assert_extends,
    backends,
    device,
    make_cache,
    oracle,
)

from kvtier_kernels import RaggedKV, get_kernels
from kvtier_kernels.fp8 import FP8_DTYPES, as_stored, narrowed, put, restored, take, widened

dtypes = pytest.mark.parametrize("fp8", FP8_DTYPES, ids=["e4m3", "e5m2"])
# Largest relative error of a rounding to 3 and 2 bits behind the first.
ROUNDING = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}
# Root mean square error of an output beside its own root mean square, for KV of normal numbers.
OUTPUT_ERROR = {torch.float8_e4m3fn: 0.05, torch.float8_e5m2: 0.10}


@dtypes
@given(exponent=st.integers(-4, 4), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 1000))
def test_a_number_is_stored_as_sglang_stores_it_and_comes_back_within_a_rounding(
    fp8, exponent, scale, seed
):
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(50, generator=generator, device="cpu") * 2.0**exponent * scale
    stored = as_stored(x, fp8, scale)
    assert torch.equal(stored, x.div(scale).to(fp8).float())
    # Exactly a number of the cache, in whatever dtype it is computed with.
    assert torch.equal(as_stored(stored, fp8, 1.0), stored)
    assert torch.equal(widened(stored.to(fp8)).float(), stored)
    normal = x.abs() / scale > torch.finfo(fp8).smallest_normal
    error = ((restored(stored, scale) - x).abs() / x.abs())[normal]
    assert error.max() <= ROUNDING[fp8] * (1 + 1e-5)


@dtypes
def test_what_is_too_large_is_stored_as_the_largest_number(fp8):
    x = torch.tensor([1e9, -1e9, float("inf"), 3.0])
    largest = torch.finfo(fp8).max
    assert narrowed(x, fp8).float().tolist() == [largest, -largest, largest, 3.0]


def test_a_cache_of_the_models_dtype_takes_numbers_as_they_are():
    x = torch.randn(3).bfloat16()
    assert as_stored(x, torch.bfloat16, 2.0) is x


@pytest.mark.parametrize("dtype", [*FP8_DTYPES, torch.bfloat16, torch.float32], ids=str)
def test_entries_are_moved_bit_by_bit(dtype):
    bits = torch.randint(0, 256, (8, 2, 3 * dtype.itemsize), dtype=torch.uint8)
    x, index = bits.view(dtype), torch.tensor([5, 1, 1])
    for dim in (0, 1):
        of_dim = index % x.shape[dim]
        expected = x.view(torch.uint8).index_select(dim, of_dim)
        assert torch.equal(take(x, dim, of_dim).view(torch.uint8), expected)
    target = torch.zeros(8, 2, 3, dtype=dtype)
    put(target, torch.tensor([2, 0]), x[:2])
    assert torch.equal(target.view(torch.uint8)[[2, 0]], bits[:2])


@backends
@dtypes
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_entries_are_attended_to_in_the_querys_precision(name, fp8, dtype):
    torch.manual_seed(3)
    heads, group, dim = 2, 4, 64
    prefixes, news = [130, 0, 70], [9, 20, 3]
    k, v = make_cache(heads, dim, torch.float32)
    kv = RaggedKV(k.to(fp8), v.to(fp8))
    slots = torch.randperm(2999)[: sum(prefixes)] + 1
    q = torch.randn(sum(news), heads, group, dim).to(dtype)
    k_new, v_new = (as_stored(torch.randn(len(q), heads, dim), fp8, 1.0).to(dtype) for _ in "kv")
    assert_extends(get_kernels(name), q, k_new, v_new, kv, slots, prefixes, news)


@backends
@dtypes
def test_the_output_is_off_by_no_more_than_the_documented_error(name, fp8):
    torch.manual_seed(5)
    kernels, entries = get_kernels(name), 2000
    k, v = make_cache(1, 64, torch.float32)
    q, slots = torch.randn(4, 1, 4, 64), torch.randperm(2999)[:entries] + 1
    k_new, v_new = (as_stored(torch.randn(4, 1, 64), fp8, 1.0) for _ in "kv")
    plan = kernels.plan(slots, [0, entries])
    kv = RaggedKV(k.to(fp8), v.to(fp8))
    state = kernels.extend(q, k_new, v_new, [0, 4], kv, plan, 64**-0.5)
    visible = torch.arange(entries + 4)[None, :] <= (entries + torch.arange(4))[:, None]
    exact, _ = oracle(q, torch.cat([k[slots], k_new]), torch.cat([v[slots], v_new]), visible)
    error = (state.o - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < OUTPUT_ERROR[fp8]


@backends
@dtypes
def test_new_tokens_are_written_as_they_are_attended_to(name, fp8):
    k, v = (torch.zeros(50, 2, 32).to(fp8) for _ in "kv")
    new = as_stored(torch.randn(2, 5, 2, 32), fp8, 1.0)
    slots = torch.tensor([7, 3, 9, 1, 20])
    get_kernels(name).store(new[0], new[1], RaggedKV(k, v), slots)
    assert torch.equal(k.float()[slots], new[0])
    assert torch.equal(v.float()[slots], new[1])

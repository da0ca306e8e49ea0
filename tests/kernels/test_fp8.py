"""KV of one byte a number: what is stored, and how far that is from what was to be stored. That
every backend attends to exactly that is in test_equivalence.py."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_equivalence import make_cache, oracle

from kvtier_kernels.fp8 import FP8_DTYPES, as_stored, narrowed, restored, widened

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
    x = torch.randn(50, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent * scale
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
    # A cache of the model's dtype takes numbers as they are.
    assert as_stored(x, x.dtype, 2.0) is x


@dtypes
def test_the_output_is_off_by_no_more_than_the_documented_error(fp8):
    torch.manual_seed(5)
    k, v = make_cache(1, 64, torch.float32, slots=2000)
    q, visible = torch.randn(4, 1, 4, 64), torch.ones(4, 2000, dtype=torch.bool)
    exact, _ = oracle(q, k, v, visible)
    found, _ = oracle(q, k.to(fp8), v.to(fp8), visible)
    assert (found - exact).square().mean().sqrt() / exact.square().mean().sqrt() < OUTPUT_ERROR[fp8]

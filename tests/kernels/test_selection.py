"""Selection and merging: every backend against definitions in float64. Without a GPU the Triton
kernels run in the interpreter."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_equivalence import DEVICE, device, runnable  # noqa: F401
from thorough import THOROUGH

from kvtier_kernels import get_kernels
from kvtier_kernels.bins import UNMERGED
from kvtier_kernels.merging import assign
from kvtier_kernels.prediction import predicted_logits, window_lse
from kvtier_kernels.registry import AUTOMATIC
from kvtier_kernels.scores import window_mass

backends = pytest.mark.parametrize("name", [runnable(name) for name in ("reference", "triton")])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
seeds, dtypes = st.integers(0, 10_000), st.sampled_from(DTYPES)
TOLERANCE = {"reference": 1e-5, "triton": 1e-4}


@contextmanager
def selecting(name):
    """Selection and merging by that backend, whatever the device, and in blocks of little."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(invalid="ignore"):
        patch.setitem(AUTOMATIC, DEVICE, name)
        patch.setattr("kvtier_kernels.blocks._BLOCK_FLOATS", 1 << 10)
        patch.setattr("kvtier_kernels.reference_backend.selection._TILE_HOMES", 32)
        patch.setattr("kvtier_kernels.reference_backend.selection._TILE_FLOATS", 1 << 10)
        patch.setattr("kvtier_kernels.triton_backend.selecting._STRETCH", 64)
        yield


def tokens_first(x):
    """The same `[heads, tokens, dim]` in the memory layout of exact KV."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


# -- homes --


@backends
@settings(max_examples=40 if THOROUGH else 10)
@given(
    seed=seeds,
    tokens=st.integers(1, 300),
    count=st.integers(1, 200),
    dim=st.sampled_from([6, 16, 40, 144]),
    floor=st.sampled_from([-1.0, 0.0, 0.3, 0.8]),
    broken=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    dtype=dtypes,
)
# Several tiles of either kind, of each size that there is; and everything kept.
@example(seed=0, tokens=200, count=70, dim=16, floor=0.0, broken=0.0, dtype=torch.float32)
@example(seed=0, tokens=9, count=9, dim=6, floor=0.0, broken=0.0, dtype=torch.float32)
@example(seed=0, tokens=300, count=70, dim=40, floor=0.3, broken=0.3, dtype=torch.float16)
@example(seed=0, tokens=200, count=70, dim=144, floor=0.3, broken=0.01, dtype=torch.float16)
def test_every_entry_goes_to_the_most_similar_one_above_the_floor(
    name, seed, tokens, count, dim, floor, broken, dtype
):
    count = min(count, tokens)
    torch.manual_seed(seed)
    # A few directions and a little noise, so that there is much to merge.
    directions, which = torch.randn(2, 12, dim), torch.randint(0, 12, (2, tokens))
    keys = directions.gather(1, which.unsqueeze(-1).expand(-1, -1, dim))
    keys = ((keys + 0.3 * torch.randn(2, tokens, dim)) * 3).to(dtype)
    kept = torch.rand(2, tokens).argsort(1)[:, :count]
    is_kept = torch.zeros(2, tokens, dtype=torch.bool).scatter_(1, kept, True)
    lost = is_kept & (torch.rand(2, tokens) < broken)
    keys = tokens_first(keys.masked_fill(lost.unsqueeze(-1), float("nan")))
    with selecting(name):
        target = assign(keys, kept, floor).target
    assert torch.equal(target.gather(1, kept), torch.arange(count).expand(2, -1))
    unit = torch.nn.functional.normalize(keys.double(), dim=-1)
    homes = unit.gather(1, kept.unsqueeze(-1).expand(-1, -1, dim))
    # Homes that are not of numbers are like no entry.
    alike = (unit @ homes.transpose(1, 2)).nan_to_num(nan=-2.0)
    best, margin = alike.amax(-1), TOLERANCE[name] / 10
    reached = alike.gather(2, target.clamp(min=0).unsqueeze(2)).squeeze(2)
    finds_home = (reached >= best - margin) & (reached > floor - margin)
    is_right = torch.where(target == UNMERGED, best <= floor + margin, finds_home)
    assert (is_right | is_kept).all()


@pytest.mark.parametrize("name", [runnable("triton")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equal_homes_the_first_is_chosen(name, dtype):
    """The products of a library that the reference takes may round equal ones differently."""
    torch.manual_seed(0)
    # Small whole numbers, so that no order of summing makes equal homes differ.
    keys = torch.randn(2, 1, 24).round().expand(2, 200, 24).to(dtype)
    with selecting(name):
        target = assign(keys, torch.arange(0, 200, 2).expand(2, -1)).target
    assert (target[:, 1::2] == 0).all()


@backends
@pytest.mark.parametrize("floor", [-1.0, 0.0, 0.9, 1.0])
def test_keys_that_are_zero_or_not_numbers_are_like_no_other_on_either_side(name, floor):
    torch.manual_seed(0)
    keys = torch.randn(2, 40, 8)
    # Equal ones, which a floor of 1 does not merge either.
    keys[:, 20:24] = keys[:, 6:10]
    keys[0, 3], keys[0, 5], keys[0, 30], keys[0, 31] = float("nan"), float("inf"), 0.0, float("nan")
    with selecting(name):
        target = assign(keys, torch.arange(10).expand(2, -1), floor=floor).target
    assert target[0, 31] == UNMERGED
    assert floor < 0 or target[0, 30] == UNMERGED
    assert floor < 1 or (target[:, 10:] == UNMERGED).all()
    assert floor == 1 or torch.equal(target[1, 20:24], torch.arange(6, 10))
    assert not ((target[0, 10:] == 3) | (target[0, 10:] == 5)).any()


# -- bins --


@backends
@settings(max_examples=25 if THOROUGH else 8)
@given(
    seed=seeds,
    tokens=st.integers(1, 200),
    count=st.integers(1, 5),
    rows=st.integers(1, 5),
    lost=st.sampled_from([0.0, 0.4, 1.0]),
    dim=st.sampled_from([1, 5, 48]),
    dtype=dtypes,
)
# A bin of several tiles; bins of nothing.
@example(seed=0, tokens=300, count=5, rows=3, lost=0.4, dim=48, dtype=torch.float16)
@example(seed=0, tokens=9, count=3, rows=1, lost=1.0, dim=1, dtype=torch.float32)
def test_a_bin_holds_sums_over_its_entries(name, seed, tokens, count, rows, lost, dim, dtype):
    """Bins are of very different sizes, the first the largest."""
    torch.manual_seed(seed)
    target = (torch.rand(2, tokens) ** 3 * count).long()
    target.masked_fill_(torch.rand(2, tokens) < lost, UNMERGED)
    x, weights = 60 * torch.randn(2, rows, tokens), torch.randn(tokens, 2).T
    vectors = tokens_first(torch.randn(2, tokens, dim).to(dtype))
    with selecting(name):
        bins = get_kernels(name).selection.bins(target, count)
        shares, mass = bins.log_softmax(x)
        mixed = bins.mix(weights, vectors)
    index = torch.where(target == UNMERGED, count, target)
    member = torch.nn.functional.one_hot(index, count + 1).double()
    expected = (x.double().unsqueeze(-1) + member.log().unsqueeze(1)).logsumexp(2)
    torch.testing.assert_close(mass, expected.float(), rtol=1e-5, atol=1e-5)
    own = expected.gather(2, index.unsqueeze(1).expand(-1, rows, -1))
    torch.testing.assert_close(shares, (x - own).float(), rtol=1e-5, atol=1e-4)
    sums = (member * weights.double().unsqueeze(-1)).transpose(1, 2) @ vectors.double()
    torch.testing.assert_close(mixed, sums[:, :count].float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(bins.sizes(), member.sum(1).long()[:, :count])


@pytest.mark.skipif(DEVICE != "cuda", reason="the interpreter runs programs one by one")
def test_a_gpu_sums_bins_in_an_order() -> None:
    """With atomics sums would differ from one run to the next."""
    bins = get_kernels("triton").selection.bins(torch.randint(0, 5, (2, 5000)), 5)
    weights, vectors = torch.randn(2, 5000), torch.randn(2, 5000, 24)
    once, again = (bins.mix(weights, vectors) for _ in range(2))
    assert torch.equal(once, again)


# -- attention of windows and of the newest queries --


@backends
@settings(max_examples=30 if THOROUGH else 5)
@given(
    seed=seeds,
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    starts=st.lists(st.integers(0, 50), min_size=3, max_size=3),
    group=st.sampled_from([1, 3, 4]),
    dim=st.sampled_from([8, 48]),
    window=st.sampled_from([7, 16, 100]),
    adjacent=st.booleans(),
)
# Several tiles of rows and of columns, the last ones not full, beside a window of one token.
@example(0, [70, 1, 33], [0, 0, 0], 3, 48, 100, False)
# Cut at multiples of 20 in the context: 10, 20, 20 and 5 rows, then 35 that begin a context.
@example(1, [55, 35], [10, 0, 0], 2, 8, 20, True)
def test_window_mass_is_the_attention_that_a_token_draws_from_its_window(
    name, seed, lengths, starts, group, dim, window, adjacent
):
    torch.manual_seed(seed)
    q, k = torch.randn(sum(lengths), 2, group, dim), torch.randn(sum(lengths), 2, dim)
    if not adjacent:
        # The same numbers, dimensions apart.
        q, k = q.mT.contiguous().mT, k.mT.contiguous().mT
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    with selecting(name):
        got = window_mass(q, k, bounds, starts[: len(lengths)], 0.2, window)
    for begin, length, start in zip(bounds, lengths, starts, strict=False):
        rows = slice(begin, begin + length)
        place = (start + torch.arange(length)) // window
        logits = torch.einsum("rhgd,thd->hgrt", q[rows].double(), k[rows].double()) * 0.2
        logits.masked_fill_(place[:, None] != place, float("-inf"))
        expected = logits.softmax(-1).sum(2).mean(1)
        rtol = 0 if name == "reference" else 1e-4
        torch.testing.assert_close(got[:, rows].double(), expected, rtol=rtol, atol=1e-5)


@backends
@settings(max_examples=25 if THOROUGH else 8)
@given(
    seed=seeds,
    window=st.integers(1, 40),
    group=st.integers(1, 3),
    tokens=st.integers(1, 80),
    alpha=st.sampled_from([0.0, 0.5, 0.9, 0.999]),
    normalised=st.booleans(),
    dtype=dtypes,
    size=st.sampled_from([1.0, 200.0]),
)
# Several tiles of queries, of rows, of keys and of stretches of those, the last ones not full; the
# same of the other size; scores that no float holds.
@example(0, 40, 3, 150, 0.9, True, torch.float16, 1.0)
@example(0, 2, 2, 40, 0.0, False, torch.float32, 1.0)
@example(0, 32, 1, 64, 0.9, False, torch.float32, 200.0)
def test_predictions_are_the_moving_average_of_scores_query_by_query(
    name, seed, window, group, tokens, alpha, normalised, dtype, size
):
    torch.manual_seed(seed)
    q = (size * torch.randn(window, 2, group, 20)).to(dtype)
    keys = tokens_first(torch.randn(2, tokens, 20).to(dtype))
    with selecting(name):
        lse = window_lse(q, keys, 0.7)
        divided_by = lse if normalised else torch.zeros_like(lse)
        got = predicted_logits(q, keys, 0.7, alpha, divided_by)
    assert got.dtype == lse.dtype == torch.float32
    limit = {"rtol": TOLERANCE[name], "atol": TOLERANCE[name] * size}
    logits = torch.einsum("whgd,hnd->whgn", q.double(), keys.double()) * 0.7
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1), **limit)
    old, new = torch.tensor([alpha, 1 - alpha]).double().log()
    average = torch.full_like(logits[0], float("-inf"))
    for scores in logits - divided_by.double().unsqueeze(-1):
        average = torch.logaddexp(average + old, scores + new)
    whole = torch.tensor(1 - alpha**window).double().log()
    torch.testing.assert_close(got.double(), average - whole, **limit)

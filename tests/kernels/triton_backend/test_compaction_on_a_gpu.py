"""The results of merging and prediction on a GPU, which are those of a CPU.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from thorough import THOROUGH

from kvtier_kernels.bins import UNMERGED, Bins
from kvtier_kernels.merging import Assignment, Entries, assign, compensate, merge_bins
from kvtier_kernels.prediction import predicted_logits, window_lse
from kvtier_kernels.registry import AUTOMATIC
from kvtier_kernels.triton_backend.kernels import TritonSelection
from kvtier_kernels.triton_backend.selection import prediction

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = TritonSelection()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
seeds = st.integers(0, 10_000)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens_first(x: torch.Tensor) -> torch.Tensor:
    """The same `[heads, tokens, dim]` in the memory layout of exact KV."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@contextmanager
def kernels() -> Iterator[None]:
    """Selection and merging by Triton kernels, whatever the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(AUTOMATIC, "cpu", "triton")
        yield


def moved(x: Any, device: str) -> Any:
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, tuple):
        return type(x)(*(moved(part, device) for part in x))
    return x


def on_gpu(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    # The interpreter's numpy warns of what is not a number.
    with kernels(), np.errstate(invalid="ignore"):
        return moved(call(*(moved(x, DEVICE) for x in arguments), **options), "cpu")


# -- assignment --


def similarity(keys: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """`[heads, tokens, count]` in float64, -2 for homes that are not of numbers."""
    unit = torch.nn.functional.normalize(keys.double(), dim=-1)
    homes = unit.gather(1, kept.unsqueeze(-1).expand(-1, -1, keys.shape[-1]))
    return (unit @ homes.transpose(1, 2)).nan_to_num(nan=-2.0)


@settings(max_examples=40 if THOROUGH else 10)
@given(
    seed=seeds,
    tokens=st.integers(1, 300),
    count=st.integers(1, 200),
    dim=st.sampled_from([6, 16, 40, 144]),
    floor=st.sampled_from([-1.0, 0.0, 0.3, 0.8]),
    broken=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from(DTYPES),
)
# Several tiles of either kind, of each size that there is; and everything kept.
@example(seed=0, tokens=200, count=70, dim=16, floor=0.0, broken=0.0, dtype=torch.float32)
@example(seed=0, tokens=9, count=9, dim=6, floor=0.0, broken=0.0, dtype=torch.float32)
@example(seed=0, tokens=300, count=70, dim=40, floor=0.3, broken=0.3, dtype=torch.float16)
@example(seed=0, tokens=200, count=70, dim=144, floor=0.3, broken=0.3, dtype=torch.float16)
def test_entries_go_where_a_cpu_sends_them_but_for_rounding(
    seed: int,
    tokens: int,
    count: int,
    dim: int,
    floor: float,
    broken: float,
    dtype: torch.dtype,
) -> None:
    count, generator = min(count, tokens), torch.Generator().manual_seed(seed)
    # A few directions and a little noise, so that there is much to merge.
    which = torch.randint(0, 12, (2, tokens), generator=generator)
    directions = normal(seed + 1, 2, 12, dim)
    keys = directions.gather(1, which.unsqueeze(-1).expand(-1, -1, dim))
    keys = ((keys + 0.3 * normal(seed + 2, 2, tokens, dim)) * 3).to(dtype)
    kept = torch.rand(2, tokens, generator=generator).argsort(1)[:, :count]
    is_kept = torch.zeros(2, tokens, dtype=torch.bool).scatter_(1, kept, True)
    lost = is_kept & (torch.rand(2, tokens, generator=generator) < broken)
    keys = tokens_first(keys.masked_fill(lost.unsqueeze(-1), float("nan")))
    expected = assign(keys, kept, floor).target
    got = on_gpu(assign, keys, kept, floor=floor).target
    alike = similarity(keys, kept)
    reached = [alike.gather(2, x.clamp(min=0).unsqueeze(2)).squeeze(2) for x in (got, expected)]
    same_home = (reached[0] - reached[1]).abs() < 1e-5
    at_floor = (alike.amax(-1) - floor).abs() < 1e-5
    assert ((got == expected) | torch.where(got * expected < 0, at_floor, same_home)).all()
    assert torch.equal(got.gather(1, kept), expected.gather(1, kept))


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equal_homes_the_first_is_chosen(dtype: torch.dtype) -> None:
    # Small whole numbers, so that no order of summing makes equal homes differ.
    keys = normal(0, 2, 1, 24).round().expand(2, 200, 24).to(dtype)
    kept = torch.arange(0, 200, 2).expand(2, -1)
    target = on_gpu(assign, keys, kept).target
    assert (target[:, 1::2] == 0).all()


@pytest.mark.parametrize("floor", [-1.0, 0.0, 0.9, 1.0])
def test_keys_that_are_zero_or_not_numbers_are_like_no_other_on_either_side(floor: float) -> None:
    keys = normal(0, 2, 40, 8)
    # Equal ones, which a floor of 1 does not merge either.
    keys[:, 20:24] = keys[:, 6:10]
    keys[0, 3], keys[0, 5], keys[0, 30], keys[0, 31] = float("nan"), float("inf"), 0.0, float("nan")
    kept = torch.arange(10).expand(2, -1)
    target = on_gpu(assign, keys, kept, floor=floor).target
    assert torch.equal(target, assign(keys, kept, floor=floor).target)
    assert target[0, 31] == UNMERGED
    assert floor < 1 or (target[:, 10:] == UNMERGED).all()
    assert not ((target[0, 10:] == 3) | (target[0, 10:] == 5)).any()


# -- bins --


def make_target(seed: int, tokens: int, count: int, lost: float) -> torch.Tensor:
    """Bins of very different sizes, the first the largest."""
    generator = torch.Generator().manual_seed(seed)
    target = (torch.rand(2, tokens, generator=generator) ** 3 * count).long()
    return target.masked_fill_(torch.rand(2, tokens, generator=generator) < lost, UNMERGED)


@settings(max_examples=25 if THOROUGH else 6)
@given(
    seed=seeds,
    tokens=st.integers(1, 200),
    count=st.integers(1, 5),
    rows=st.integers(1, 5),
    lost=st.sampled_from([0.0, 0.4, 1.0]),
    dim=st.sampled_from([1, 5, 48]),
)
# A bin of several tiles; bins of nothing.
@example(seed=0, tokens=300, count=5, rows=3, lost=0.4, dim=48)
@example(seed=0, tokens=9, count=3, rows=1, lost=1.0, dim=1)
def test_sorted_bins_hold_what_bins_hold(
    seed: int, tokens: int, count: int, rows: int, lost: float, dim: int
) -> None:
    target = make_target(seed, tokens, count, lost)
    plain, quick = Bins(target, count), TRITON.bins(target.to(DEVICE), count)
    x, vectors = 60 * normal(seed, 2, rows, tokens), normal(seed + 1, 2, tokens, dim)
    weights = normal(seed + 2, 2, tokens)
    shares, mass = (part.cpu() for part in quick.log_softmax(x.to(DEVICE)))
    expected_shares, expected_mass = plain.log_softmax(x)
    torch.testing.assert_close(mass, expected_mass, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(shares, expected_shares, rtol=1e-5, atol=1e-4)
    mixed = quick.mix(weights.to(DEVICE), vectors.to(DEVICE)).cpu()
    torch.testing.assert_close(mixed, plain.mix(weights, vectors), rtol=1e-4, atol=1e-4)
    assert torch.equal(quick.sizes().cpu(), plain.sizes())


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_of_any_layout_and_dtype_are_mixed(dtype: torch.dtype) -> None:
    target = make_target(1, 90, 7, 0.2)
    vectors = normal(2, 90, 2, 12).to(dtype).transpose(0, 1)
    weights = normal(3, 90, 2).T
    got = TRITON.bins(target.to(DEVICE), 7).mix(weights.to(DEVICE), vectors.to(DEVICE))
    torch.testing.assert_close(got.cpu(), Bins(target, 7).mix(weights, vectors))


# -- merging --

# Entries that are kept: few, as each has a program, which takes its time in the interpreter.
KEPT = 5


def make_problem(
    seed: int, group: int, vote_rows: int, dtype: torch.dtype
) -> tuple[Entries, torch.Tensor, Assignment]:
    """Entries of two heads with votes, logits that tell them apart, and some that are unmerged. Of
    those kept, the first takes in more than a tile has, the last no other."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (tokens_first(normal(seed + i, 2, 120, 24).to(dtype)) for i in range(2))
    votes = torch.randint(1, 9, (2, vote_rows, 120), generator=generator).log()
    kept = torch.rand(2, 120, generator=generator).argsort(1)[:, :KEPT]
    target = make_target(seed, 120, KEPT - 1, 0.3)
    target.scatter_(1, kept, torch.arange(KEPT).expand(2, -1))
    logits = 4 * normal(seed + 3, 2, group, 120)
    return Entries(k, v, votes), logits, Assignment(kept, target)


def no_logits(keys: torch.Tensor) -> torch.Tensor:
    """Return zeros, so that an entry's vote is its bin's mass, however its key was rounded."""
    return torch.zeros(len(keys), 1, keys.shape[1], device=keys.device)


def assert_entries(got: Entries, expected: Entries) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        # A sum in another order may round to the next number of the dtype.
        tolerance = 1e-4 if mine.dtype == torch.float32 else torch.finfo(mine.dtype).eps
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=1e-4)


@settings(max_examples=8 if THOROUGH else 3)
@given(seed=seeds, group=st.integers(1, 4), dtype=st.sampled_from(DTYPES), apart=st.booleans())
@example(seed=0, group=3, dtype=torch.float16, apart=True)
def test_entries_merge_alike(seed: int, group: int, dtype: torch.dtype, apart: bool) -> None:
    problem = make_problem(seed, group, group if apart else 1, dtype)
    assert_entries(on_gpu(merge_bins, *problem, no_logits), merge_bins(*problem, no_logits))


@pytest.mark.skipif(DEVICE != "cuda", reason="the interpreter runs programs one by one")
def test_merging_twice_gives_the_same_bits() -> None:
    """Sums have an order: on a GPU, atomics would not."""
    problem = make_problem(5, 4, 1, torch.bfloat16)
    once, again = (on_gpu(merge_bins, *problem, no_logits) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


# -- prediction --


@settings(max_examples=25 if THOROUGH else 5)
@given(
    seed=seeds,
    window=st.integers(1, 40),
    group=st.integers(1, 3),
    tokens=st.integers(1, 80),
    alpha=st.sampled_from([0.0, 0.9]),
    normalised=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
# Several tiles of queries, of rows and of keys, the last ones not full; the same of the other size.
@example(seed=0, window=40, group=3, tokens=70, alpha=0.9, normalised=True, dtype=torch.float16)
@example(seed=0, window=2, group=2, tokens=40, alpha=0.0, normalised=False, dtype=torch.float32)
def test_the_newest_queries_predict_alike(
    seed: int,
    window: int,
    group: int,
    tokens: int,
    alpha: float,
    normalised: bool,
    dtype: torch.dtype,
) -> None:
    q = normal(seed, window, 2, group, 20).to(dtype)
    keys = tokens_first(normal(seed + 1, 2, tokens, 20).to(dtype))
    lse = window_lse(q, keys, 0.7)
    got = TRITON.window_lse(q.to(DEVICE), keys.to(DEVICE), 0.7)
    torch.testing.assert_close(got.cpu(), lse, rtol=1e-4, atol=1e-4)
    normaliser = lse if normalised else torch.zeros_like(lse)
    expected = predicted_logits(q, keys, 0.7, alpha, normaliser)
    with kernels():
        got = predicted_logits(*(moved(x, DEVICE) for x in (q, keys, 0.7, alpha, normaliser)))
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_many_keys_are_summed_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "_STRETCH", 64)
    q, keys = normal(0, 3, 1, 2, 16), normal(1, 1, 150, 16)
    got = TRITON.window_lse(q.to(DEVICE), keys.to(DEVICE), 0.3)
    torch.testing.assert_close(got.cpu(), window_lse(q, keys, 0.3), rtol=1e-4, atol=1e-4)


def test_what_is_unmerged_is_folded_alike() -> None:
    entries, _, assignment = make_problem(7, 2, 2, torch.bfloat16)
    assert_entries(on_gpu(compensate, entries, assignment), compensate(entries, assignment))

"""Scores equal their definitions, computed densely in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from thorough import THOROUGH

from kvtier_kernels.registry import AUTOMATIC
from kvtier_kernels.scores import (
    Rotation,
    _whitening,
    key_difference,
    leverage_scores,
    turn,
    unrotate,
    window_mass,
)
from kvtier_kernels.selection import Stretch
from kvtier_kernels.triton_backend.kernels import TritonSelection


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense_mass(
    q: torch.Tensor, k: torch.Tensor, positions: list[int], scale: float, window: int
) -> torch.Tensor:
    """One request, token by token, in float64: who looks at whom inside a window."""
    tokens, heads, group, _ = q.shape
    q, k = q.double(), k.double()
    mass = torch.zeros(heads, tokens, dtype=torch.float64)
    for row in range(tokens):
        seen = [t for t in range(tokens) if positions[t] // window == positions[row] // window]
        for head in range(heads):
            for g in range(group):
                weights = torch.softmax(k[seen, head] @ q[row, head, g] * scale, 0)
                mass[head, seen] += weights / group
    return mass


@settings(max_examples=15 if THOROUGH else 3)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    group=st.sampled_from([1, 3, 4]),
    adjacent=st.booleans(),
)
# Several tiles of rows and of columns, the last ones not full, beside a window of one token.
@example(seed=0, lengths=[70, 1, 33], group=3, adjacent=False)
def test_window_mass_on_a_gpu_is_that_of_a_cpu(seed, lengths, group, adjacent):
    bounds = [0, *itertools.accumulate(lengths)]
    q, k = normal(seed, bounds[-1], 2, group, 48), normal(seed + 1, bounds[-1], 2, 48)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    windows = [Stretch(begin, end, end - begin) for begin, end in itertools.pairwise(bounds)]
    if not adjacent:
        # The same numbers, dimensions apart.
        q, k = q.mT.contiguous().mT, k.mT.contiguous().mT
    got = TritonSelection().window_mass(q.to(device), k.to(device), windows, 0.2)
    for begin, end, width in windows:
        rows = slice(begin, end)
        expected = window_mass(q[rows], k[rows], [0, width], [0], 0.2, width)
        torch.testing.assert_close(got[:, rows].cpu(), expected, rtol=1e-4, atol=1e-5)


def test_windows_side_by_side_on_a_gpu_are_those_of_a_cpu(monkeypatch):
    q, k = normal(1, 90, 2, 2, 16), normal(2, 90, 2, 16)
    # Cut at multiples of 20 in the context: 10, 20, 20 and 5 rows, then 35 that begin a context.
    cut = ([0, 55, 90], [10, 0], 0.3, 20)
    expected = window_mass(q, k, *cut)
    monkeypatch.setitem(AUTOMATIC, "cpu", "triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    got = window_mass(q.to(device), k.to(device), *cut).cpu()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    starts=st.lists(st.integers(0, 50), min_size=3, max_size=3),
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    window=st.sampled_from([2, 7, 16]),
)
def test_window_mass_is_the_dense_column_sum(
    seed: int, lengths: list[int], starts: list[int], heads: int, group: int, window: int
) -> None:
    dim = 8
    q, k = normal(seed, sum(lengths), heads, group, dim), normal(seed + 1, sum(lengths), heads, dim)
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    got = window_mass(q, k, bounds, starts[: len(lengths)], dim**-0.5, window)
    for i, length in enumerate(lengths):
        rows = slice(bounds[i], bounds[i + 1])
        positions = [starts[i] + t for t in range(length)]
        expected = dense_mass(q[rows], k[rows], positions, dim**-0.5, window)
        torch.testing.assert_close(got[:, rows].double(), expected, rtol=0, atol=1e-5)


def test_a_prefill_cut_at_window_bounds_scores_as_if_it_were_not_cut() -> None:
    q, k = normal(0, 100, 2, 2, 16), normal(1, 100, 2, 16)
    whole = window_mass(q, k, [0, 100], [0], 0.25, 16)
    parts = [
        window_mass(q[a:b], k[a:b], [0, b - a], [a], 0.25, 16)
        for a, b in [(0, 32), (32, 48), (48, 100)]
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-6)


def test_large_batches_are_scored_in_blocks_with_the_same_result() -> None:
    q, k = normal(0, 8192, 2, 4, 8), normal(1, 8192, 2, 8)
    whole = window_mass(q, k, [0, 8192], [0], 0.3, 256)
    torch.testing.assert_close(whole.sum(1), torch.full((2,), 8192.0), rtol=1e-4, atol=0)
    last = window_mass(q[-256:], k[-256:], [0, 256], [8192 - 256], 0.3, 256)
    torch.testing.assert_close(whole[:, -256:], last, rtol=1e-5, atol=1e-6)


def exact_leverage(keys: torch.Tensor) -> torch.Tensor:
    x = keys.double() - keys.double().mean(1, keepdim=True)
    u = torch.linalg.svd(x, full_matrices=False).U
    return u.square().sum(-1)


def test_exact_leverage_is_that_of_the_svd() -> None:
    keys = normal(3, 3, 500, 24) * torch.logspace(0, -2, 24)
    got = leverage_scores(keys).double()
    torch.testing.assert_close(got, exact_leverage(keys), rtol=1e-3, atol=1e-6)
    assert got.min() >= 0
    torch.testing.assert_close(
        got.sum(1), torch.full((3,), 24.0, dtype=torch.float64), rtol=1e-3, atol=0
    )


def test_directions_that_no_key_has_count_for_nothing() -> None:
    keys = torch.cat([normal(4, 1, 300, 4), torch.zeros(1, 300, 4)], -1)
    torch.testing.assert_close(
        leverage_scores(keys), leverage_scores(keys[..., :4]), rtol=1e-3, atol=1e-6
    )
    assert torch.isfinite(leverage_scores(torch.ones(2, 10, 4))).all()


@pytest.mark.parametrize("seed", range(5))
def test_keys_that_hardly_vary_are_scored_too(seed: int) -> None:
    """One strong direction and 31 at float32's rounding: the Gram matrix may look indefinite."""
    strong = 1000 * normal(seed, 2, 4096, 1) * normal(seed + 1, 2, 1, 32)
    got = leverage_scores(strong + 1e-3 * normal(seed + 2, 2, 4096, 32) + 100)
    assert torch.isfinite(got).all()
    assert got.min() >= 0
    assert got.max() <= 1.5


@pytest.mark.parametrize("tokens", [1, 2, 12, 31])
def test_fewer_tokens_than_dimensions_are_scored_too(tokens: int) -> None:
    """The Gram matrix of a short turn is singular: no token can be said to stick out."""
    got = leverage_scores(normal(tokens, 3, tokens, 32))
    expected = torch.full((3, tokens), (tokens - 1) / tokens)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-2)


def test_keys_that_are_not_numbers_raise_nothing() -> None:
    """A server must survive them; their head's scores say nothing, the other heads' are sound."""
    keys = normal(0, 2, 64, 8)
    sound = leverage_scores(keys)[1]
    keys[0, 3, 2] = float("nan")
    got = leverage_scores(keys)
    assert torch.isnan(got[0]).all()
    torch.testing.assert_close(got[1], sound)


@pytest.mark.parametrize("drift", [0.0, 30.0])
def test_long_contexts_are_scored_in_blocks_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch, drift: float
) -> None:
    """Also where the first block, by which all are centred at first, is far from the others."""
    keys = normal(7, 2, 3000, 16) + 5
    keys[:, :300] += drift
    monkeypatch.setattr("kvtier_kernels.blocks._BLOCK_FLOATS", 300 * 2 * 16)
    monkeypatch.setattr("kvtier_kernels.blocks._CHUNK_TOKENS", 128)
    got = leverage_scores(keys).double()
    torch.testing.assert_close(got, exact_leverage(keys), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_keys_are_scored_as_what_they_were(
    monkeypatch: pytest.MonkeyPatch, interleaved: bool
) -> None:
    keys = normal(8, 2, 500, 24)
    angles = torch.arange(500)[:, None] * torch.logspace(0, -3, 8)
    rotation = Rotation(angles.cos(), angles.sin(), interleaved)
    monkeypatch.setattr("kvtier_kernels.blocks._BLOCK_FLOATS", 90 * 2 * 24)
    expected = leverage_scores(unrotate(keys, rotation.cos, rotation.sin, interleaved=interleaved))
    torch.testing.assert_close(leverage_scores(keys, rotation), expected)
    assert not torch.allclose(leverage_scores(keys), expected, rtol=1e-2)


@pytest.mark.parametrize("below_zero", [0.0, 3e-6, 3e-4])
def test_a_gram_matrix_that_rounding_made_indefinite_gets_a_larger_ridge(
    below_zero: float,
) -> None:
    """An eigenvalue below zero by a share of their mean: heads are helped one by one."""
    turn = torch.linalg.qr(normal(9, 6, 6).double()).Q
    sound = torch.tensor([1.0, 1, 1, 1, 1, 1]).double()
    broken = torch.tensor([1.0, 1, 1, 1, 2, -below_zero]).double()
    hopeless = torch.tensor([1.0, 1, 1, 1, 3, -1]).double()
    grams = torch.stack([turn @ x.diag() @ turn.T for x in (sound, broken, hopeless)])
    whiten = _whitening(grams).double()
    torch.testing.assert_close(
        whiten[0] @ whiten[0].T, torch.linalg.inv(grams[0]), rtol=1e-4, atol=1e-4
    )
    # In the directions that there are, it is the inverse still.
    seen = turn[:, :5]
    expected = (seen.T @ grams[1] @ seen).inverse()
    got = seen.T @ whiten[1] @ whiten[1].T @ seen
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-3)
    assert torch.isnan(whiten[2]).all()


def rank_correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Spearman's."""
    ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [32, 256])
def test_leverage_ranks_tokens_as_the_svd_does(dim: int, dtype: torch.dtype) -> None:
    keys = (normal(dim, 2, 4096, dim) / torch.arange(1, dim + 1)).to(dtype)
    got, exact = leverage_scores(keys), exact_leverage(keys)
    assert min(rank_correlation(a, b) for a, b in zip(got, exact, strict=True)) > 0.999


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_unrotate_undoes_a_rotation(interleaved: bool, factor: float) -> None:
    heads, tokens, dim, rotary = 2, 50, 24, 16
    keys = normal(6, heads, tokens, dim)
    angles = torch.arange(tokens)[:, None] * torch.logspace(0, -3, rotary // 2)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    turned = keys.clone()
    first = slice(0, rotary, 2) if interleaved else slice(0, rotary // 2)
    second = slice(1, rotary, 2) if interleaved else slice(rotary // 2, rotary)
    a, b = keys[..., first], keys[..., second]
    turned[..., first], turned[..., second] = a * cos - b * sin, b * cos + a * sin
    back = unrotate(turned, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(back, keys, rtol=1e-5, atol=1e-5)
    assert not math.isclose(float((turned - keys).abs().max()), 0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shift", [-30, -1, 1, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turned_keys_are_those_of_other_positions(
    interleaved: bool, shift: int, dtype: torch.dtype
) -> None:
    """The keys may carry any factor."""
    keys, factor = normal(6, 2, 50, 24), 1.3

    def at(*positions: int) -> Rotation:
        angles = torch.tensor(positions)[:, None] * torch.logspace(0, -3, 8)
        return Rotation(angles.cos() * factor, angles.sin() * factor, interleaved)

    def rotated(by: Rotation) -> torch.Tensor:
        # Undone by the opposite angle, but for the factor.
        back = unrotate(keys, by.cos, -by.sin, interleaved=interleaved)
        back[..., :16] *= factor**2
        return back.to(dtype)

    first, moved = (range(begin, begin + 50) for begin in (40, 40 + shift))
    turned = turn(rotated(at(*first)), at(abs(shift)), back=shift < 0)
    assert turned.dtype == dtype
    off = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(turned, rotated(at(*moved)), rtol=off, atol=off)


@pytest.mark.parametrize("tokens", [1, 7, 500])
@pytest.mark.parametrize("rotated", [False, True])
def test_key_difference_is_its_definition_block_by_block(tokens, rotated, monkeypatch):
    monkeypatch.setattr("kvtier_kernels.blocks._BLOCK_FLOATS", 20_000)
    keys, angles = normal(3, 2, tokens, 64), normal(4, tokens, 32)
    rotation = Rotation(angles.cos(), angles.sin()) if rotated else None
    scores = key_difference(keys, rotation)
    plain = keys if rotation is None else unrotate(keys, rotation.cos, rotation.sin)
    directions = torch.nn.functional.normalize(plain.double(), dim=-1)
    mean = directions.mean(1, keepdim=True)
    dense = -torch.nn.functional.cosine_similarity(directions, mean.expand_as(directions), dim=-1)
    torch.testing.assert_close(scores.double(), dense, rtol=1e-4, atol=2e-4)

"""Scores of keys equal their definitions, computed densely in float64, block by block. Those that
backends compute are in test_selection.py."""

from __future__ import annotations

import pytest
import torch

from kvtier_kernels.scores import Rotation, key_difference, leverage_scores, turn, unrotate


@pytest.fixture(autouse=True)
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_kernels.blocks._BLOCK_FLOATS", 10_000)
    monkeypatch.setattr("kvtier_kernels.blocks._CHUNK_TOKENS", 128)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact_leverage(keys: torch.Tensor) -> torch.Tensor:
    x = keys.double() - keys.double().mean(1, keepdim=True)
    u = torch.linalg.svd(x, full_matrices=False).U
    return u.square().sum(-1)


@pytest.mark.parametrize("drift", [0.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leverage_is_that_of_the_svd(drift: float, dtype: torch.dtype) -> None:
    """Also where the first block, by which all are centred at first, is far from the others."""
    keys = normal(3, 3, 3000, 24) * torch.logspace(0, 0 if drift else -2, 24) + 5
    keys[:, :130] += drift
    keys = keys.to(dtype)
    got = leverage_scores(keys).double()
    torch.testing.assert_close(got, exact_leverage(keys), rtol=1e-3, atol=1e-6)
    assert got.min() >= 0


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


def rotated(keys: torch.Tensor, by: Rotation) -> torch.Tensor:
    """The keys with the first 2 * 8 numbers rotated, in pairs."""
    half = by.cos.shape[-1]
    first = slice(0, 2 * half, 2) if by.interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if by.interleaved else slice(half, 2 * half)
    a, b, turned = keys[..., first], keys[..., second], keys.clone()
    turned[..., first], turned[..., second] = a * by.cos - b * by.sin, b * by.cos + a * by.sin
    return turned


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_a_rotation_is_undone_and_moved_on_or_back(interleaved: bool, factor: float) -> None:
    """The keys may carry any factor."""
    keys = normal(6, 2, 50, 24)

    def at(*positions: int) -> Rotation:
        angles = torch.tensor(positions)[:, None] * torch.logspace(0, -3, 8)
        return Rotation(angles.cos() * factor, angles.sin() * factor, interleaved)

    here = at(*range(40, 90))
    turned = rotated(keys, here)
    back = unrotate(turned, here.cos, here.sin, interleaved=interleaved)
    torch.testing.assert_close(back, keys, rtol=1e-5, atol=1e-5)
    for shift in (-30, -1, 1, 400):
        moved = rotated(keys, at(*range(40 + shift, 90 + shift)))
        for dtype, off in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
            got = turn(turned.to(dtype), at(abs(shift)), back=shift < 0)
            assert got.dtype == dtype
            torch.testing.assert_close(got.float(), moved, rtol=off, atol=off)
    scores = leverage_scores(turned, here)
    torch.testing.assert_close(scores, leverage_scores(back))
    assert not torch.allclose(leverage_scores(turned), scores, rtol=1e-2)


@pytest.mark.parametrize("tokens", [1, 7, 500])
@pytest.mark.parametrize("is_rotated", [False, True])
def test_key_difference_is_its_definition(tokens: int, is_rotated: bool) -> None:
    keys, angles = normal(3, 2, tokens, 64), normal(4, tokens, 32)
    rotation = Rotation(angles.cos(), angles.sin()) if is_rotated else None
    scores = key_difference(keys, rotation)
    plain = keys if rotation is None else unrotate(keys, rotation.cos, rotation.sin)
    directions = torch.nn.functional.normalize(plain.double(), dim=-1)
    mean = directions.mean(1, keepdim=True)
    dense = -torch.nn.functional.cosine_similarity(directions, mean.expand_as(directions), dim=-1)
    torch.testing.assert_close(scores.double(), dense, rtol=1e-4, atol=2e-4)

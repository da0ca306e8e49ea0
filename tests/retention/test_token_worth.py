"""The predicted worth of tokens, and the best of all heads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import UsageError
from kvtier.heads.profile import ModelShape
from kvtier.retention import token_worth
from kvtier.retention.head_budgets import best_of_all
from kvtier.retention.scorers.base import Span
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.token_worth import (
    PLACE_WIDTH,
    SINK_TOKENS,
    Fit,
    TokenWorth,
    feature_width,
    features,
)
from kvtier_kernels.scores import Rotation

HEADS, DIM, LAYERS = 2, 8, 3
WIDTH = feature_width(HEADS, DIM)
PLACE = slice(-1 - PLACE_WIDTH, -1)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotated(keys: torch.Tensor) -> tuple[torch.Tensor, Rotation]:
    angles = normal(9, keys.shape[1], DIM // 2)
    cos, sin = angles.cos(), angles.sin()
    a, b = keys.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1), Rotation(cos, sin)


def test_a_fit_finds_the_weights_that_made_the_attention() -> None:
    truth = TokenWorth(0.1 * normal(0, 1, HEADS, WIDTH))
    fit = Fit(1)
    for seed, tokens in enumerate((100, 400, 900, 2000)):
        keys, rotation = rotated(normal(seed, HEADS, tokens, DIM))
        values = normal(seed + 50, HEADS, tokens, DIM)
        drawn = truth.predict(0, keys, values, rotation).exp()
        fit.add(0, keys, values, rotation, drawn)
    keys, rotation = rotated(normal(99, HEADS, 200, DIM))
    values = normal(98, HEADS, 200, DIM)
    found = fit.solve().predict(0, keys, values, rotation)
    expected = truth.predict(0, keys, values, rotation)
    # The ridge costs a little of every weight, most where features are nearly those of others.
    assert float(torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1]) > 0.999


@pytest.mark.parametrize("tokens", [6, 40])
def test_a_fit_in_blocks_is_the_fit_in_one_whatever_its_first_tokens_draw(tokens: int) -> None:
    keys, rotation = rotated(normal(1, HEADS, tokens, DIM))
    values, drawn = normal(2, HEADS, tokens, DIM), normal(3, HEADS, tokens).exp()
    fits = []
    for block in (1000, 7, 1):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(token_worth, "BLOCK_TOKENS", block)
            fit = Fit(1)
            fit.add(0, keys, values, rotation, drawn)
            fits.append(fit.solve().weights)
        drawn[:, :SINK_TOKENS] *= 1e6
    torch.testing.assert_close(fits[1], fits[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(fits[2], fits[0], rtol=1e-4, atol=1e-6)


def test_what_a_token_is_does_not_depend_on_its_rotation() -> None:
    plain, values = normal(1, HEADS, 30, DIM), normal(2, HEADS, 30, DIM)
    keys, rotation = rotated(plain)
    torch.testing.assert_close(
        features(keys, values, rotation), features(plain, values, None), rtol=1e-4, atol=1e-5
    )


@given(first=st.integers(0, 3000), tokens=st.integers(1, 40))
def test_the_place_of_a_token_is_a_number_wherever_the_context_begins(
    first: int, tokens: int
) -> None:
    """The tokens of a later turn stand where they would stand in one long turn."""
    keys, values = normal(1, HEADS, tokens, DIM), normal(2, HEADS, tokens, DIM)
    place = features(keys, values, None, first)[:, PLACE]
    assert place.isfinite().all()
    whole = torch.zeros(HEADS, first + tokens, DIM)
    torch.testing.assert_close(features(whole, whole, None)[first:, PLACE], place)


@given(tokens=st.integers(1, 40), seed=st.integers(0, 20), first=st.integers(0, 90))
def test_predicting_needs_no_features_of_neighbours(tokens: int, seed: int, first: int) -> None:
    """Products with one's own features, shifted, are those with all features: blocks included."""
    worth = TokenWorth(normal(seed, LAYERS, HEADS, WIDTH))
    keys, rotation = rotated(normal(seed, HEADS, tokens, DIM))
    values = normal(seed + 1, HEADS, tokens, DIM)
    expected = worth.weights[1] @ features(keys, values, rotation, first).T
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(token_worth, "BLOCK_TOKENS", 7)
        found = worth.predict(1, keys, values, rotation, first)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@given(
    tokens=st.integers(1, 40),
    seed=st.integers(0, 20),
    first=st.integers(0, 90),
    kv_heads=st.sampled_from([2, 4, 6]),
    ranks=st.sampled_from([1, 2]),
)
def test_ranks_together_score_as_one_that_holds_all_heads(
    tokens: int, seed: int, first: int, kv_heads: int, ranks: int
) -> None:
    worth = TokenWorth(normal(seed, LAYERS, kv_heads, feature_width(kv_heads, DIM)))
    keys, rotation = rotated(normal(seed, kv_heads, tokens, DIM))
    values = normal(seed + 1, kv_heads, tokens, DIM)
    shape = ModelShape(
        num_layers=LAYERS, num_kv_heads=kv_heads, num_attention_heads=kv_heads, head_dim=DIM
    )
    held = [shape.kv_heads_of_rank(rank, ranks) for rank in range(ranks)]
    parts: list[torch.Tensor] = []

    def scored(heads: range, total) -> torch.Tensor:
        scorer = Reconstruction.of(worth).among_ranks(heads, total)
        mine = slice(heads.start, heads.stop)
        state = torch.empty(len(heads), 0, tokens)
        return scorer.score(Span(keys[mine], state, first, rotation, values[mine], 1))

    def remember(part: torch.Tensor) -> torch.Tensor:
        parts.append(part.clone())
        return part

    for heads in held:
        scored(heads, remember)
    found = [scored(heads, lambda _: torch.stack(parts).sum(0)) for heads in held]
    expected = worth.predict(1, keys, values, rotation, first)
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4)


def test_weights_and_queries_come_back_from_their_file(tmp_path: Path) -> None:
    weights, queries = normal(0, LAYERS, HEADS, WIDTH), normal(1, LAYERS, HEADS, DIM, DIM)
    worth = TokenWorth(weights, queries=queries)
    worth.save(tmp_path / "worth.npz")
    again = TokenWorth.load(tmp_path / "worth.npz")
    assert torch.equal(again.weights, worth.weights)
    assert again.queries is not None
    torch.testing.assert_close(again.queries, queries, rtol=1e-3, atol=1e-3)
    others = (TokenWorth(weights), TokenWorth(weights + 1, queries=queries))
    others = (*others, TokenWorth(weights, queries=queries + 1))
    assert worth.digest == again.digest not in {other.digest for other in others}


def test_ranks_code_their_heads_keys_as_one_rank_does() -> None:
    queries = normal(1, LAYERS, HEADS, DIM, 40)
    seen = queries @ queries.transpose(2, 3)
    whole = Reconstruction.of(TokenWorth(normal(0, LAYERS, HEADS, WIDTH), queries=seen))
    ranks = [whole.among_ranks(range(head, head + 1), lambda x: x) for head in range(HEADS)]
    found = [one.feedback() for one in (whole, *ranks)]
    assert all(one is not None for one in found)
    torch.testing.assert_close(torch.cat(found[1:], 1), found[0])
    assert Reconstruction.of(TokenWorth(normal(0, LAYERS, HEADS, WIDTH))).feedback() is None


def test_weights_of_another_models_file_are_refused_before_serving() -> None:
    weights, queries = normal(0, LAYERS, HEADS, WIDTH), normal(1, LAYERS, HEADS, DIM, DIM)
    worth = TokenWorth(weights, "ours", queries)
    worth.check_fits(LAYERS, HEADS, DIM, "ours")
    worth.check_fits(LAYERS, HEADS, DIM, None)
    for fitted, layers, heads, revision, expected in (
        (worth, LAYERS, HEADS, "new", "what was fitted"),
        (worth, 4, HEADS, "ours", "weights"),
        (worth, LAYERS, 1, "ours", "weights"),
        (TokenWorth(weights, "ours", queries[:, :, 1:]), LAYERS, HEADS, "ours", "queries"),
    ):
        with pytest.raises(UsageError, match=rf"scorer\.file: expected {expected}"):
            fitted.check_fits(layers, heads, DIM, revision)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "worth.npz"
    weights, queries = normal(0, LAYERS, HEADS, WIDTH), normal(1, LAYERS, HEADS, DIM, DIM)
    for write in (
        lambda: None,
        lambda: file.touch(),
        lambda: file.write_text("{}"),
        lambda: np.savez(file, weights=normal(0, 2, 3).numpy()),
        lambda: TokenWorth(weights / 0).save(file),
        lambda: TokenWorth(weights, queries=queries[0]).save(file),
        lambda: TokenWorth(weights, queries=queries / 0).save(file),
    ):
        write()
        with pytest.raises(UsageError, match=r"scorer\.file: expected weights that"):
            TokenWorth.load(file)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_file_is_refused_or_reads_as_some_weights(tmp_path: Path, save) -> None:
    file = tmp_path / "worth.npz"
    save(file, schema=token_worth.SCHEMA, revision="", weights=np.ones((1, 1, 3), np.float32))
    whole = file.read_bytes()
    damaged = [whole[:size] for size in range(0, len(whole), 7)]
    for at in range(len(whole)):
        damaged += [whole[:at] + bytes([whole[at] ^ bits]) + whole[at + 1 :] for bits in (1, 255)]
    refused = 0
    for data in damaged:
        file.write_bytes(data)
        try:
            TokenWorth.load(file)
        except UsageError:
            refused += 1
    assert refused > len(damaged) // 2


def test_the_best_of_all_heads_are_the_best() -> None:
    worth = normal(0, LAYERS, HEADS, 50)
    kept = best_of_all(worth, 77)
    assert int(kept.sum()) == 77
    assert float(worth[kept].min()) > float(worth[~kept].max())

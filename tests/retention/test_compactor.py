"""Which tokens Compactor keeps: signals that say nothing are ignored, spans stay whole."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.retention.compactor import Compactor, pooled, z_score


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 1000), st.integers(1, 200), st.integers(1, 200))
def test_the_best_tokens_stay_in_order(seed: int, tokens: int, count: int) -> None:
    count = min(count, tokens)
    scores = normal(seed, 2, tokens)
    chosen = Compactor().select(scores, count)
    assert chosen.shape == (2, count)
    for row, kept in zip(scores, chosen, strict=True):
        assert kept.tolist() == sorted(set(kept.tolist()))
        left = set(range(tokens)) - set(kept.tolist())
        assert all(row[t] <= row[kept].min() for t in left)


def test_leverage_that_says_nothing_leaves_the_choice_to_attention() -> None:
    """Fewer tokens than key dimensions: every leverage is the same but for rounding."""
    keys, mass = normal(0, 1, 20, 32), normal(1, 1, 20).abs()
    by_mass = Compactor(leverage_weight=0.0, pool_width=1).scores(keys, mass)
    both = Compactor(leverage_weight=1.0, pool_width=1).scores(keys, mass)
    torch.testing.assert_close(both, by_mass, rtol=0, atol=0.2)


def test_attention_that_says_nothing_leaves_the_choice_to_leverage() -> None:
    keys = normal(2, 1, 500, 16)
    keys[0, 77] *= 20
    assert Compactor(pool_width=1).scores(keys, torch.ones(1, 500)).argmax() == 77


def test_neighbours_of_what_sticks_out_stay_with_it() -> None:
    keys = 0.1 * normal(3, 1, 500, 16)
    keys[0, 250] *= 50
    chosen = Compactor(pool_width=5).select(Compactor().scores(keys, torch.ones(1, 500)), 5)
    assert chosen.tolist() == [[248, 249, 250, 251, 252]]


def test_pooling_keeps_the_mean_of_what_exists() -> None:
    row = torch.tensor([[1.0, 2.0, 6.0]])
    assert pooled(row, 3).tolist() == [[1.5, 3.0, 4.0]]
    assert pooled(row, 1) is row


def test_a_constant_row_scores_zero() -> None:
    assert z_score(torch.full((2, 9), 3.0)).tolist() == [[0.0] * 9] * 2
    assert z_score(torch.zeros(1, 4)).tolist() == [[0.0] * 4]

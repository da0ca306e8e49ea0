"""Predicted scores are the paper's moving average, computed step by step in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_kernels.prediction import predicted_logits, window_lse, window_weights


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def average(q: torch.Tensor, k: torch.Tensor, scale: float, alpha: float = 0.0) -> torch.Tensor:
    """Return the average of scores as they are."""
    return predicted_logits(q, k, scale, alpha, torch.zeros(q.shape[:3]))


def dense_logits(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.einsum("whgd,hnd->whgn", q.double(), k.double()) * scale


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    window=st.integers(1, 40),
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    tokens=st.integers(1, 30),
    alpha=st.sampled_from([0.0, 0.5, 0.9, 0.999]),
)
def test_the_weighted_mean_is_the_average_updated_query_by_query(
    seed: int, window: int, heads: int, group: int, tokens: int, alpha: float
) -> None:
    q, k = normal(seed, window, heads, group, 8), normal(seed + 1, heads, tokens, 8)
    running = torch.zeros(heads, group, tokens, dtype=torch.float64)
    for scores in dense_logits(q, k, 0.5).exp():
        running = alpha * running + (1 - alpha) * scores
    expected = (running / (1 - alpha**window)).log()
    got = average(q, k, 0.5, alpha)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), window=st.integers(1, 20))
def test_normalised_queries_predict_attention(seed: int, window: int) -> None:
    q, k = normal(seed, window, 3, 2, 8), normal(seed + 1, 3, 25, 8)
    lse = window_lse(q, k, 0.7)
    logits = dense_logits(q, k, 0.7)
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    weights = window_weights(window, 0.8).view(-1, 1, 1, 1)
    expected = (weights * logits.softmax(-1)).sum(0).log()
    got = predicted_logits(q, k, 0.7, 0.8, lse)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.exp().sum(-1), torch.ones(3, 2), rtol=1e-5, atol=0)


def test_one_query_predicts_its_own_logits() -> None:
    q, k = normal(0, 5, 2, 3, 16), normal(1, 2, 40, 16)
    expected = dense_logits(q, k, 0.25)[-1]
    for got in (average(q[-1:], k, 0.25, 0.9), average(q, k, 0.25)):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@given(window=st.integers(1, 500), alpha=st.floats(0, 0.9999))
def test_weights_sum_to_one_and_fall_with_age(window: int, alpha: float) -> None:
    weights = window_weights(window, alpha)
    assert float(weights.sum()) == pytest.approx(1)
    assert (weights.diff() >= 0).all()


def test_scores_that_no_float_holds_are_averaged_all_the_same() -> None:
    q, k = normal(0, 32, 1, 1, 16), normal(1, 1, 64, 16)
    got = average(200 * q, k, 1.0, 0.9)
    assert torch.isfinite(got).all()
    assert got.abs().max() > 500


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    q, k = normal(0, 8, 2, 2, 16).to(dtype), normal(1, 2, 40, 16).to(dtype)
    expected = average(q.float(), k.float(), 0.25, 0.9)
    torch.testing.assert_close(average(q, k, 0.25, 0.9), expected)
    torch.testing.assert_close(window_lse(q, k, 0.25), window_lse(q.float(), k.float(), 0.25))


def test_long_contexts_are_read_in_blocks_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k = normal(0, 8, 2, 2, 16), normal(1, 2, 333, 16)
    whole = average(q, k, 0.25, 0.9), window_lse(q, k, 0.25)
    monkeypatch.setattr("kvtier_kernels.blocks._BLOCK_FLOATS", 1 << 10)
    torch.testing.assert_close(average(q, k, 0.25, 0.9), whole[0])
    torch.testing.assert_close(window_lse(q, k, 0.25), whole[1])


def test_bad_input_is_refused_by_name() -> None:
    q, k = normal(0, 8, 2, 2, 16), normal(1, 2, 40, 16)
    for alpha in (-0.1, 1.0):
        with pytest.raises(ValueError, match="alpha"):
            average(q, k, 1.0, alpha)
    with pytest.raises(ValueError, match="window"):
        average(q[:0], k, 1.0)
    with pytest.raises(ValueError, match="q_window and keys"):
        average(q[0], k, 1.0)
    with pytest.raises(ValueError, match="q_window"):
        window_lse(q, k[..., :8], 1.0)

"""ALiBi's reach: the theorem where its assumptions hold, the norm against a dense one, refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import UnsupportedModelError, UsageError
from kvtier.heads.calibrate import check_model
from kvtier.heads.probes.alibi import alibi_scopes

HIDDEN, DIM = 16, 4


@given(st.integers(0, 2**31), st.floats(0.05, 1.0), st.floats(1e-4, 0.2))
def test_weights_beyond_the_scope_are_at_most_epsilon(
    seed: int, slope: float, epsilon: float
) -> None:
    """Inputs of ±1 and equal query and key projections: what the proof assumes."""
    generator = torch.Generator().manual_seed(seed)
    weights = 0.05 * torch.randn(1, DIM, HIDDEN, generator=generator, dtype=torch.float64)
    gamma, bias = torch.randn(2, HIDDEN, generator=generator, dtype=torch.float64)
    scope = float(alibi_scopes(weights, weights, gamma, bias, torch.tensor([slope]), epsilon))
    tokens = min(int(scope) + 20, 2000)
    signs = torch.randint(0, 2, (tokens, HIDDEN), generator=generator) * 2.0 - 1.0
    q = (gamma * signs.double() + bias) @ weights[0].T
    distance = torch.arange(tokens - 1, -1, -1, dtype=torch.float64)
    attention = torch.softmax(q @ q[-1] - slope * distance, dim=0)
    beyond = attention[distance > scope]
    assert len(beyond) == 0 or float(beyond.max()) <= epsilon


@given(st.integers(0, 2**31), st.floats(0.1, 2.0))
def test_the_formula_is_the_paper_s(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    w_q, w_k = torch.randn(2, 3, DIM, HIDDEN, generator=generator)
    gamma, slopes = torch.randn(HIDDEN, generator=generator), torch.tensor([0.5, 0.25, 0.125])
    got = alibi_scopes(w_q, w_k, gamma, None, slopes, epsilon=1e-3, scale=scale)
    for head in range(3):
        norm = torch.linalg.matrix_norm(w_q[head].double().T @ w_k[head].double(), ord=2) * scale
        wanted = (2 * norm * gamma.double().square().sum() + 6.907755278982137) / slopes[head]
        assert float(got[head]) == pytest.approx(float(wanted))


def test_a_bad_epsilon_is_named() -> None:
    weights, one = torch.ones(1, 1, 1), torch.ones(1)
    with pytest.raises(UsageError, match="epsilon"):
        alibi_scopes(weights, weights, one, None, one, epsilon=1)


@pytest.mark.parametrize("extra", [{"alibi": True}, {"attn_config": {"alibi": True}}])
def test_models_with_alibi_are_refused(extra: dict[str, Any], tmp_path: Path) -> None:
    config = {
        "architectures": ["FalconForCausalLM"], "num_hidden_layers": 1, "num_attention_heads": 2,
        "hidden_size": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config | extra))
    with pytest.raises(UnsupportedModelError, match="ALiBi"):
        check_model(str(tmp_path))

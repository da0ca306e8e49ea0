"""How many slots of each class SGLang's answer becomes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvtier.config import load_settings
from kvtier.heads.profile import ModelShape, full_profile, random_profile
from kvtier.pool_sizing import SessionShape
from kvtier_sglang.pool import sizing

SHAPE = ModelShape(num_layers=3, num_kv_heads=4, num_attention_heads=8, head_dim=32)
SESSION = SessionShape(
    context_tokens=2000, turn_tokens=200, kept_tokens=385, prefill_tokens=2000, retention=1.0
)


def sized(monkeypatch, profile, cap: int) -> tuple[int, int]:
    """The slots where SGLang is told to make at most `cap`, of a budget for many more."""
    monkeypatch.setattr(sizing, "session_shape", lambda settings, longest: SESSION)
    configurator = SimpleNamespace(
        kv_cache_dtype=torch.float32, model_config=SimpleNamespace(context_len=1 << 20)
    )
    config, locality_slots = sizing.size_pools(
        lambda *args, **kwargs: SimpleNamespace(max_total_num_tokens=cap),
        configurator,
        10**10,
        load_settings(),
        [profile],
    )
    return config.max_total_num_tokens, locality_slots


@pytest.mark.parametrize("cap", [10_000, 1_000_000])
def test_without_locality_heads_no_prompt_that_fits_is_refused_for_want_of_their_slots(
    monkeypatch, cap
):
    """However much shorter the sessions are that the pools are planned for."""
    assert sized(monkeypatch, full_profile(SHAPE), cap) == (cap, cap)


def test_with_locality_heads_they_have_what_the_planned_sessions_keep(monkeypatch):
    ca_slots, locality_slots = sized(monkeypatch, random_profile(SHAPE, 3, seed=1), 100_000)
    assert SESSION.total_tokens < locality_slots < ca_slots / 2

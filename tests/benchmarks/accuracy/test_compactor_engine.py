"""kvtier's side of the Compactor comparison, as far as it needs no engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.accuracy import compactor_engine as side
from benchmarks.common.recall_arguments import DEMO_MODEL
from benchmarks.common.recall_engine import PROFILE_FILE
from kvtier.config import Settings
from kvtier.heads.profile import full_profile, load_profile
from kvtier.pool_sizing import slot_bytes
from kvtier.retention.scorers import SCORERS

PROFILE = load_profile(DEMO_MODEL / PROFILE_FILE)
SCORER_NAMES = st.sampled_from(list(SCORERS))


@given(st.floats(0.01, 1.0), st.integers(1024, 1 << 17), SCORER_NAMES)
def test_retention_of_all_heads_is_the_share(share: float, tokens: int, scorer: str) -> None:
    alike = full_profile(PROFILE.shape)
    assert side.retention_for(1, alike, tokens, scorer=scorer) == 1
    per_slot = slot_bytes(alike, 4, state_width=SCORERS[scorer].state_width)
    kept = side.retention_for(share, alike, tokens, scorer=scorer) * per_slot.ca
    if share < 1:
        # A little less is kept where windows and scores are paid from the same bytes.
        assert kept == pytest.approx(share * slot_bytes(alike, 4).full)


@given(st.floats(0.01, 1.0), st.integers(1024, 1 << 17), SCORER_NAMES)
def test_retention_under_a_profile_keeps_the_bytes_asked_for(
    share: float, tokens: int, scorer: str
) -> None:
    retention = side.retention_for(share, PROFILE, tokens, scorer=scorer)
    exact = slot_bytes(PROFILE, 4)
    per_slot = slot_bytes(PROFILE, 4, state_width=SCORERS[scorer].state_width)
    settings = Settings()
    held = settings.locality.kept_tokens + 1
    kept = per_slot.ca * retention * tokens + per_slot.locality * held
    wanted = share * exact.full * tokens
    if 1 / tokens < retention < 1:
        assert kept == pytest.approx(wanted)
    elif retention == 1 and share < 1:
        assert kept <= wanted * (1 + 1e-9)

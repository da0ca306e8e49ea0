"""kvtier's side of the Compactor comparison, as far as it needs no engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.accuracy import compactor_engine as side
from benchmarks.common.recall_arguments import DEMO_MODEL
from benchmarks.common.recall_engine import PROFILE_FILE
from kvtier.config import Settings
from kvtier.heads.profile import full_profile, load_profile
from kvtier.pool_sizing import kept_slots, slot_bytes
from kvtier.retention.scorers import SCORERS
from kvtier.retention.shares import PAGE

PROFILE = load_profile(DEMO_MODEL / PROFILE_FILE)
SCORER_NAMES = st.sampled_from(list(SCORERS))


@given(
    st.floats(0.01, 1.0), st.integers(1024, 1 << 17), SCORER_NAMES, st.sampled_from(["all", "some"])
)
def test_a_context_takes_the_bytes_asked_for(
    share: float, tokens: int, scorer: str, heads: str
) -> None:
    profile = full_profile(PROFILE.shape) if heads == "all" else PROFILE
    assert side.retention_for(1, profile, tokens, scorer=scorer) == 1
    retention = side.retention_for(share, profile, tokens, scorer=scorer)
    num_heads = PROFILE.shape.num_layers * PROFILE.shape.num_kv_heads
    edges = Settings().locality.kept_tokens(competes=False)
    per_slot = slot_bytes(
        PROFILE.shape, 4, state_width=SCORERS[scorer].state_width, votes=int(heads == "some")
    )
    kept = kept_slots(tokens, edges, retention, profile.num_ca_heads, num_heads) * per_slot
    wanted = share * slot_bytes(PROFILE.shape, 4) * tokens
    if edges + PAGE < retention * tokens < tokens:
        # A share is rounded up to pages.
        assert 0 <= kept - wanted + per_slot < 2 * PAGE * per_slot
    elif retention == 1 and share < 1:
        assert kept <= wanted + 2 * PAGE * per_slot

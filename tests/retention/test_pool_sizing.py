"""The cost of a slot, and how many sessions a budget holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import BudgetError
from kvtier.heads.profile import ModelShape
from kvtier.pool_sizing import SessionShape, kept_slots, plan_pool, slot_bytes
from kvtier.retention.shares import PAGE

SHAPE = ModelShape(num_layers=3, num_kv_heads=4, num_attention_heads=8, head_dim=32)
HEADS = 12
EDGES = 384


def test_a_slot_has_the_kv_of_all_heads_and_what_is_kept_beside_it():
    kv = HEADS * 2 * 32 * 2
    assert slot_bytes(SHAPE, 2) == kv
    assert slot_bytes(SHAPE, 2, state_width=3, votes=0) == kv + 4 * (3 * HEADS + 1) + 8
    assert slot_bytes(SHAPE, 2, votes=2) == kv + 8 + 4 * HEADS * 2
    assert slot_bytes(SHAPE.of_rank(2), 2) == kv // 2


@given(context=st.integers(1, 200_000), share=st.floats(0.01, 1), anchored=st.integers(0, HEADS))
def test_a_context_takes_the_pages_of_its_heads_and_never_more_than_it_has(
    context, share, anchored
):
    kept = kept_slots(context, EDGES, share, anchored, HEADS)
    assert min(context, EDGES) <= kept <= context
    if context > EDGES + 20 * PAGE:
        entries = max(share * context - EDGES, 1)
        pages = anchored * (entries / PAGE + 1) + HEADS - anchored
        assert kept - EDGES <= PAGE * (pages / HEADS + 1) + 1
        assert HEADS * (kept - EDGES) >= min(anchored * entries, HEADS * (context - EDGES))


def test_a_context_costs_its_anchored_heads_pages_and_one_for_every_other_head():
    """A quarter of the heads makes a session of 128k almost four times smaller."""
    context = 128 * 1024
    assert 3.8 < context / kept_slots(context, EDGES, 1.0, 3, HEADS) < 4
    assert 3.9 < context / kept_slots(context, EDGES, 0.25, HEADS, HEADS) <= 4
    assert kept_slots(100_000, EDGES, 1.0, 0, HEADS) == EDGES + PAGE


@given(st.integers(500, 50_000), st.floats(0.05, 1), st.floats(1.0, 40.0))
def test_a_plan_fits_its_budget_and_holds_a_running_prefill(context, share, sessions):
    per_slot = slot_bytes(SHAPE, 4)
    session = SessionShape(context, 200, kept_slots(context, EDGES, share, HEADS, HEADS))
    budget = int(sessions * per_slot * session.total_tokens)
    plan = plan_pool(budget + per_slot, per_slot, session)
    assert plan.slots * per_slot <= budget + per_slot
    assert plan.slots >= session.total_tokens
    assert plan.sessions >= sessions * 0.99
    rest = (plan.sessions - 1) * session.resting_tokens + session.total_tokens
    assert rest == pytest.approx(plan.slots)


def test_a_budget_below_one_session_names_what_it_takes():
    with pytest.raises(BudgetError, match="KV budget: expected at least 480000 bytes for one"):
        plan_pool(1000, 400, SessionShape(1000, 200, 385))

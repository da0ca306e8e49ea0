"""The arithmetic of the two pools."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import BudgetError
from kvtier.heads.profile import ModelShape, full_profile, random_profile, window_profile
from kvtier.pool_sizing import (
    SessionShape,
    SlotBytes,
    locality_slots_for,
    plan_pools,
    plan_ranks,
    session_bytes,
    slot_bytes,
    with_tables,
)

SHAPE = ModelShape(num_layers=3, num_kv_heads=4, num_attention_heads=8, head_dim=32)


def session(context: int, prefill: int | None = None) -> SessionShape:
    return SessionShape(context, 200, 385, context if prefill is None else prefill)


@given(st.integers(0, 12))
def test_the_classes_share_the_bytes_of_a_token(num_ca):
    per_slot = slot_bytes(random_profile(SHAPE, num_ca, seed=1), dtype_bytes=2)
    assert per_slot.full == 12 * 2 * 32 * 2
    assert per_slot.ca == num_ca * 2 * 32 * 2


def test_a_quarter_of_the_heads_makes_a_128k_session_almost_four_times_smaller():
    per_slot = slot_bytes(random_profile(SHAPE, 3, seed=1), dtype_bytes=4)
    shape = session(128 * 1024)
    assert 3.8 < per_slot.full * shape.total_tokens / session_bytes(per_slot, shape) < 4


@given(st.integers(500, 50_000), st.integers(1, 12), st.floats(1.0, 40.0))
def test_a_plan_fits_its_budget_and_holds_a_running_prefill(context, num_ca, sessions):
    per_slot = slot_bytes(random_profile(SHAPE, num_ca, seed=3), dtype_bytes=4)
    shape = session(context)
    budget = int(sessions * per_slot.full * shape.total_tokens) + 64 * per_slot.full
    plan = plan_pools(budget, per_slot, shape)
    if per_slot.locality:
        used = plan.ca_slots * per_slot.ca + plan.locality_slots * per_slot.locality
        assert used <= budget
        assert plan.locality_slots >= shape.prefill_tokens
    assert plan.ca_slots >= shape.total_tokens * 0.99
    assert plan.sessions >= sessions * 0.99


@given(st.integers(500, 50_000), st.integers(1, 12), st.floats(2.0, 40.0))
def test_a_plan_with_tables_has_room_for_what_every_slot_has_beside_its_kv(
    context, num_ca, sessions
):
    per_slot = slot_bytes(random_profile(SHAPE, num_ca, seed=3), dtype_bytes=2)
    shape = session(context)
    budget = int(sessions * per_slot.full * shape.total_tokens) + 256 * per_slot.full
    plan = plan_pools(budget, with_tables(per_slot), shape)
    kv = plan.ca_slots * per_slot.ca + plan.locality_slots * per_slot.locality
    assert kv + 65 * plan.ca_slots + 12 * plan.locality_slots <= budget


def test_without_locality_heads_the_class_is_never_the_bottleneck():
    per_slot = slot_bytes(full_profile(SHAPE), dtype_bytes=4)
    plan = plan_pools(10**9, per_slot, session(1000))
    assert plan.locality_slots == plan.ca_slots


def test_without_ca_heads_a_session_costs_what_it_keeps():
    per_slot = slot_bytes(window_profile(SHAPE), dtype_bytes=4)
    assert session_bytes(per_slot, session(100_000)) == (385 + 200) * per_slot.full


def test_a_budget_below_one_session_names_what_it_takes():
    per_slot = SlotBytes(ca=100, locality=300)
    with pytest.raises(BudgetError, match="KV budget: expected at least"):
        plan_pools(1000, per_slot, session(1000))


@given(st.integers(1, 200_000), st.integers(500, 40_000))
def test_slots_for_a_token_cap_hold_one_running_prefill(ca_slots, context):
    context = min(context, ca_slots)
    shape = session(context)
    slots = locality_slots_for(ca_slots, shape)
    assert slots >= min(shape.prefill_tokens, max(ca_slots, shape.prefill_tokens))


@given(st.integers(500, 50_000), st.lists(st.integers(0, 6), min_size=2, max_size=2))
def test_ranks_have_the_slots_that_the_poorest_of_them_can_pay_for(context, ca_heads):
    half, shape = SHAPE.of_rank(2), session(context)
    ranks = [slot_bytes(random_profile(half, n, seed=4), dtype_bytes=2) for n in ca_heads]
    budget = 5 * ranks[0].full * shape.total_tokens + 64 * ranks[0].full
    plan = plan_ranks(budget, ranks, shape)
    alone = [plan_pools(budget, per_slot, shape) for per_slot in ranks]
    assert plan.sessions == min(plan.sessions for plan in alone)
    assert plan.ca_slots == min(plan.ca_slots for plan in alone)
    if any(per_slot.locality for per_slot in ranks):
        for per_slot in ranks:
            used = plan.ca_slots * per_slot.ca + plan.locality_slots * per_slot.locality
            assert used <= budget

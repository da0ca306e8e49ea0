"""The reference backend's own: how it cuts a table of slots in runs, and attention in blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_kernels.reference_backend.slots import plan_request

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def device():
    with torch.device(DEVICE):
        yield


@settings(max_examples=100)
@given(st.lists(st.integers(1, 60), min_size=0, max_size=60, unique=True), st.integers(2, 6))
def test_a_plan_covers_every_slot_once_and_leaves_votes_out_of_runs(slots, min_run):
    table = torch.tensor(slots, dtype=torch.int64)
    votes = torch.zeros(61)
    votes[::7] = 2.0
    plan = plan_request(table, votes, min_run)
    covered = [s for a, b in plan.runs for s in range(a, b)]
    loose = [] if plan.scattered is None else plan.scattered.tolist()
    assert sorted(covered + loose) == sorted(slots)
    assert all(votes[s] == 0 for s in covered)
    assert all(b - a >= min_run for a, b in plan.runs)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_without_a_tiled_operator_is_the_same_in_blocks(monkeypatch, causal):
    from kvtier_kernels.reference_backend import products

    q, k, v = torch.randn(3, 1, 2, 70, 16)
    mask = None if causal else torch.randn(1, 1, 70, 70)
    expected = products.flash(q, k, v, 0.3, causal, mask)
    monkeypatch.setattr(products, "BLOCK_LOGITS", 2 * 70 * 16)
    got = products._blockwise(q, k, v, 0.3, causal, mask)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

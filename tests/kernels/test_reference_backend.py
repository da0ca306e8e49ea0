"""The reference backend's own: how it cuts a table of slots in runs, and attention in blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from list_problems import make_problem
from test_equivalence import assert_extends, make_cache
from test_lists import assert_exact, with_unseen

from kvtier_kernels import RaggedKV
from kvtier_kernels.reference_backend import compiled, lists, products
from kvtier_kernels.reference_backend.kernels import ReferenceKernels
from kvtier_kernels.reference_backend.slots import plan_request

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def device():
    with torch.device(DEVICE):
        yield


@settings(max_examples=100)
@given(st.lists(st.integers(1, 60), min_size=0, max_size=60, unique=True), st.integers(2, 6))
def test_a_plan_covers_every_slot_once(slots, min_run):
    plan = plan_request(torch.tensor(slots, dtype=torch.int64), min_run)
    covered = [s for a, b in plan.runs for s in range(a, b)]
    loose = [] if plan.scattered is None else plan.scattered.tolist()
    assert sorted(covered + loose) == sorted(slots)
    assert all(b - a >= min_run for a, b in plan.runs)


@pytest.mark.parametrize("layout", ["slot-major", "head-major"])
def test_prefixes_are_read_in_runs_and_in_blocks(monkeypatch, layout):
    monkeypatch.setattr(products, "GATHERED_ENTRIES", 16)
    torch.manual_seed(6)
    prefixes, news = [600, 0, 530, 40], [3, 20, 1, 2]
    k, v = make_cache(2, 32, torch.float32, layout=layout)
    slots = torch.randperm(1500)[: sum(prefixes)]
    slots[20:590] = torch.arange(1600, 2170)
    slots[600:1130] = torch.arange(2300, 2830)
    q, (k_new, v_new) = torch.randn(26, 2, 3, 32), torch.randn(2, 26, 2, 32)
    kernels = ReferenceKernels()
    plan = kernels.plan(slots, [0, 600, 600, 1130, 1170])
    assert [len(own.runs) for own in plan] == [1, 0, 1, 0]
    assert_extends(kernels, q, k_new, v_new, RaggedKV(k, v), slots, prefixes, news)


@pytest.mark.parametrize("votes", [None, (), (4,)], ids=["no votes", "per entry", "per head"])
def test_lists_are_read_in_runs_in_blocks_and_by_threads(monkeypatch, votes):
    monkeypatch.setattr(lists, "compiled", None)
    monkeypatch.setattr(lists, "MIN_RUN_PAGES", 1)
    monkeypatch.setattr(products, "LONG_ENTRIES", 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(products, "GATHERED_ENTRIES", 10)
    monkeypatch.setattr(products, "BLOCK_LOGITS", 300)
    problem = make_problem(votes=votes)
    problem = problem if votes is None else with_unseen(problem)
    assert_exact("reference", problem, 4, torch.float32, [3, 0, 20])


@pytest.mark.skipif(DEVICE != "cpu", reason="compiled for a CPU")
@pytest.mark.parametrize("votes", [None, (), (4,)], ids=["no votes", "per entry", "per head"])
@pytest.mark.parametrize("threads", [2, 7, 64])
def test_threads_share_the_pages_of_lists(monkeypatch, votes, threads):
    """A list in one part, in many, and parts without a page."""
    monkeypatch.setattr(compiled, "THREAD_PAGES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    problem = make_problem(votes=votes)
    problem = problem if votes is None else with_unseen(problem)
    assert_exact("reference", problem, 4, torch.float32, [1, 1, 1])


@pytest.mark.parametrize("causal", [False, True])
def test_attention_without_a_tiled_operator_is_the_same_in_blocks(monkeypatch, causal):
    q, k, v = torch.randn(3, 1, 2, 70, 16)
    mask = None if causal else torch.randn(1, 1, 70, 70)
    expected = products.flash(q, k, v, 0.3, causal, mask)
    monkeypatch.setattr(products, "BLOCK_LOGITS", 2 * 70 * 16)
    got = products._blockwise(q, k, v, 0.3, causal, mask)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

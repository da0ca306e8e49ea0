"""The reference backend's own ways: slots and pages in runs, entries in blocks, lists by threads.
They give what the equivalence suite asks for."""

import pytest
import torch
from test_equivalence import DEVICE, assert_extends, device, make_cache  # noqa: F401
from test_lists import assert_exact, make_problem, with_unseen

from kvtier_kernels import get_kernels
from kvtier_kernels.reference_backend import compiled, lists, products

KERNELS = get_kernels("reference")
votes = pytest.mark.parametrize("votes", [None, (), (4,)], ids=["no votes", "per entry", "by head"])


def problem_of(votes):
    problem = make_problem(votes=votes)
    return problem if votes is None else with_unseen(problem)


@pytest.mark.parametrize("layout", ["slot-major", "head-major"])
def test_prefixes_are_read_in_runs_and_in_blocks(monkeypatch, layout):
    monkeypatch.setattr(products, "GATHERED_ENTRIES", 16)
    torch.manual_seed(6)
    slots = torch.randperm(1500)[:1170]
    slots[20:590] = torch.arange(1600, 2170)
    slots[600:1130] = torch.arange(2300, 2830)
    kv = make_cache(2, 32, torch.float32, layout=layout)
    plan = assert_extends(
        KERNELS, kv, 3, torch.float32, [600, 0, 530, 40], [3, 20, 1, 2], slots=slots
    )
    assert [len(own.runs) for own in plan] == [1, 0, 1, 0]


@votes
def test_lists_are_read_in_runs_in_blocks_and_by_threads(monkeypatch, votes):
    monkeypatch.setattr(lists, "compiled", None)
    monkeypatch.setattr(lists, "MIN_RUN_PAGES", 1)
    monkeypatch.setattr(products, "LONG_ENTRIES", 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(products, "GATHERED_ENTRIES", 10)
    monkeypatch.setattr(products, "BLOCK_LOGITS", 300)
    assert_exact(KERNELS.lists, problem_of(votes), 4, torch.float32, [3, 0, 20])


@pytest.mark.skipif(DEVICE != "cpu", reason="compiled for a CPU")
@votes
@pytest.mark.parametrize("threads", [2, 7, 64])
def test_threads_share_the_pages_of_lists(monkeypatch, votes, threads):
    """A list in one part, in many, and parts without a page."""
    monkeypatch.setattr(compiled, "THREAD_PAGES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert_exact(KERNELS.lists, problem_of(votes), 4, torch.float32, [1, 1, 1])


@pytest.mark.parametrize("causal", [False, True])
def test_attention_without_a_tiled_operator_is_the_same_in_blocks(monkeypatch, causal):
    q, k, v = torch.randn(3, 1, 2, 70, 16)
    mask = None if causal else torch.randn(1, 1, 70, 70)
    expected = products.flash(q, k, v, 0.3, causal, mask)
    monkeypatch.setattr(products, "BLOCK_LOGITS", 2 * 70 * 16)
    got = products._blockwise(q, k, v, 0.3, causal, mask)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

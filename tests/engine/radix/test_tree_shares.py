"""The radix tree where a share of each context is kept: which tokens stay, and whose slots go."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from packed_checks import SHAPE
from tree_harness import PROFILE, MiniScheduler, matched, run_turn
from tree_requests import context, digest

from kvtier.retention.scorers import Span
from kvtier.retention.shares import PAGE, FixedShare, QualityTarget, TokenBudget
from kvtier_sglang.tier.scopes import with_share


def test_a_share_of_the_context_gives_its_slots_back():
    s = MiniScheduler(share=FixedShare(0.4))
    run_turn(s, context(60), [1, 2, 3])
    node = next(s.tree.nodes())
    # 40% of 60 prompt tokens, the protected sink (4) and recent (6) among them: of the others one
    # page of each of six heads, which is one bundle. The answer stays, too.
    assert node.entries == node.num_slots == 10 + PAGE + 3
    assert s.allocator.available_size() == s.allocator.size - node.num_slots
    assert s.tree.evictable_size() == node.num_slots
    assert matched(s, [*context(60), 1, 2, 3]) == 63
    assert s.tree.compressor.retention.report()["retained_share"] == pytest.approx((10 + PAGE) / 60)


def test_the_best_tokens_of_a_span_are_those_that_stay():
    s = MiniScheduler(share=FixedShare(0.4))
    run_turn(s, context(60), [1])
    node = next(s.tree.nodes())
    tokens, span = context(60), node.dropped
    values = torch.tensor([digest(tokens[: p + 1]) for p in range(span.begin, span.end)])
    kv = Span(values[None, :, None].expand(1, -1, 2), (values % 97)[None, None])
    scores = s.tree.compressor.selection.scorer.score(kv)
    best = scores[0].topk(PAGE).indices.sort().values
    (packed,) = s.pool.packed.in_row(node.value)
    anchored = packed.of_column(SHAPE.num_kv_heads + PROFILE.ca_heads[1][0])
    assert torch.equal(s.pool.packed.cells.k[anchored, 0], values[best])


def test_a_session_goes_on_over_a_compacted_context_turn_by_turn():
    s = MiniScheduler(share=FixedShare(0.3))
    tokens = context(60)
    for turn in range(4):
        request = run_turn(s, tokens, [turn, 1, 2])
        if turn:
            assert request.prefix_len == len(tokens) - 40
        tokens = [*request.full_untruncated_fill_ids, *context(40, seed=turn)]
    assert s.tree.compressor.retention.reasons == {"share": 4}


def test_a_token_budget_is_for_the_whole_session():
    s = MiniScheduler(share=TokenBudget(50))
    run_turn(s, context(60), [])
    run_turn(s, [*context(60), *context(40, seed=1)], [])
    first, second = sorted(s.tree.nodes(), key=lambda node: node.start)
    # Sink, recent window, and as many pages as the rest of the budget holds.
    assert first.entries == 10 + 2 * PAGE
    # The budget leaves not even a page: the recent window and one page stay.
    assert second.entries == 6 + PAGE


def test_without_a_curve_everything_is_kept():
    s = MiniScheduler(share=QualityTarget(0.9, NoCurve()))
    run_turn(s, context(60), [])
    assert next(s.tree.nodes()).entries == 60
    assert s.tree.compressor.retention.reasons == {"no-curve": 1}


@pytest.mark.parametrize(("asked", "pages"), [(0.05, 1), (0.3, 1), (0.9, 2)])
def test_a_session_keeps_at_most_the_share_that_it_asks_for(asked, pages):
    """The server's rule allows two pages of each head; one is the least that heads keep."""
    s = MiniScheduler(share=FixedShare(0.7))
    run_turn(s, context(60), [1, 2, 3], extra_key=with_share(None, asked))
    assert next(s.tree.nodes()).entries == 10 + pages * PAGE + 3
    assert s.tree.compressor.retention.reasons == {"asked" if pages == 1 else "share": 1}


def test_a_session_that_keeps_less_takes_nothing_from_others():
    s = MiniScheduler(share=FixedShare(0.7))
    less = with_share(None, 0.05)
    run_turn(s, context(60), [1, 2, 3], extra_key=less)
    # Nobody else reads what it gave up, nor does it what others keep.
    other = run_turn(s, context(60), [1, 2, 3])
    assert other.prefix_len == 0
    assert sorted(node.entries for node in s.tree.nodes()) == [10 + PAGE + 3, 10 + 2 * PAGE + 3]
    again = run_turn(s, [*context(60), 1, 2, 3, 4], [5], extra_key=less)
    assert again.prefix_len == 63


def hits_beside(flood: Callable[[int], tuple[list[int], str | None]], requests: int) -> int:
    """The tokens that three sessions find again over four turns, another client sending so many
    requests between any two of theirs."""
    s, sent, found = MiniScheduler(share=FixedShare(0.7)), itertools.count(), 0
    sessions = [context(30, seed) for seed in range(3)]
    for turn, index in itertools.product(range(4), range(3)):
        request = run_turn(s, sessions[index], [turn])
        found += request.prefix_len
        sessions[index] = [*request.full_untruncated_fill_ids, *context(15, seed=turn)]
        for number in itertools.islice(sent, requests):
            prompt, key = flood(number)
            run_turn(s, prompt, [], extra_key=key)
    return found


@pytest.mark.parametrize("requests", [2, 4])
def test_a_client_that_floods_with_hints_harms_no_more_than_one_without(requests):
    """Each hint names another share, so each is a namespace of its own."""
    alone = hits_beside(lambda number: ([], None), 0)
    prompts = hits_beside(lambda number: ([100 + number, *context(59)], None), requests)
    shares = hits_beside(
        lambda number: ([100, *context(59)], with_share(None, (number + 1) / 100)), requests
    )
    assert prompts < alone, "the flood presses nobody"
    assert prompts <= shares <= alone


class NoCurve:
    def curve(self):
        return None

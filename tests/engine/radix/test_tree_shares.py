"""The radix tree where a share of each context is kept: which tokens stay, and whose slots go."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from tree_harness import MiniScheduler, run_turn
from tree_requests import context

from kvtier.retention.shares import PAGE, FixedShare, TokenBudget
from kvtier_sglang.tier.scopes import with_share


def test_a_token_budget_is_for_the_whole_session():
    s = MiniScheduler(share=TokenBudget(50))
    run_turn(s, context(60), [])
    run_turn(s, [*context(60), *context(40, seed=1)], [])
    first, second = sorted(s.tree.nodes(), key=lambda node: node.start)
    # Sink, recent window, and as many pages as the rest of the budget holds.
    assert first.entries == 10 + 2 * PAGE
    # The budget leaves not even a page: the recent window and one page stay.
    assert second.entries == 6 + PAGE


@pytest.mark.parametrize(("asked", "pages"), [(0.05, 1), (0.3, 1), (0.9, 2)])
def test_a_session_keeps_at_most_the_share_that_it_asks_for(asked, pages):
    """The server's rule allows two pages of each head; one is the least that heads keep."""
    s = MiniScheduler(share=FixedShare(0.7))
    run_turn(s, context(60), [1, 2, 3], extra_key=with_share(None, asked))
    assert next(s.tree.nodes()).entries == 10 + pages * PAGE + 3
    assert s.tree.compressor.retention.reasons == {"asked" if pages == 1 else "share": 1}


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


def test_a_client_that_floods_with_hints_harms_no_more_than_one_without():
    """Each hint names another share, so each is a namespace of its own."""
    requests = 4
    alone = hits_beside(lambda number: ([], None), 0)
    prompts = hits_beside(lambda number: ([100 + number, *context(59)], None), requests)
    shares = hits_beside(
        lambda number: ([100, *context(59)], with_share(None, (number + 1) / 100)), requests
    )
    assert prompts < alone, "the flood presses nobody"
    assert prompts <= shares <= alone

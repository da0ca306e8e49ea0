"""The radix tree where a share of each context is kept: which tokens stay, and whose slots go."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.sampling.sampling_params import SamplingParams
from tree_harness import MiniScheduler, matched, run_turn
from tree_requests import context

from kvtier.retention.shares import PAGE, FixedShare, TokenBudget
from kvtier_sglang.radix.turn_end import evict_first
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


DONE = {"sampling_params": SamplingParams(custom_params={"kvtier": {"done": True}})}


def test_a_session_that_is_done_is_evicted_before_older_ones():
    s, system = MiniScheduler(share=FixedShare(0.7)), context(30)
    first, second, third = ([*system, *context(40, seed)] for seed in (1, 2, 3))
    run_turn(s, first, [])
    run_turn(s, second, [])
    last = run_turn(s, [*second, *context(40, seed=4)], [], **DONE).last_node
    run_turn(s, third, [])
    s.tree.evict(EvictParams(num_tokens=last.num_slots + last.parent.num_slots))
    found = [matched(s, one) for one in (first, second, third)]
    assert (found[0], found[2]) == (len(first), len(third))
    assert found[1] <= len(system)


def test_of_a_session_that_is_done_others_tokens_stay_as_new_as_they_are():
    s, system = MiniScheduler(share=FixedShare(0.7)), context(30)
    run_turn(s, [*system, *context(40, seed=1)], [])
    theirs = next(s.tree.nodes()).session
    last = run_turn(s, [*system, *context(40, seed=2)], [], **DONE).last_node
    s.tree.remove_leaf(next(n for n in s.tree.nodes() if n.session == theirs and not n.children))
    evict_first(last, last.session)
    times = {node.session: node.last_access_time for node in last.path()}
    assert times[last.session] < 1.0 < times[theirs]


def test_of_several_sessions_that_are_done_the_first_goes_first():
    """Ranks that evict by themselves evict the same."""
    s = MiniScheduler(share=FixedShare(0.7), size=2000)
    for number in range(12):
        run_turn(s, [100 + number, *context(39, seed=number)], [], **DONE)
    for gone in range(12):
        left = sorted(node.key.token_ids[0] - 100 for node in s.tree.nodes())
        assert left == list(range(gone, 12))
        s.tree.evict(EvictParams(num_tokens=1))


def hits_beside(
    flood: Callable[[int], tuple[list[int], str | None]], requests: int, **asked
) -> int:
    """The tokens that three sessions find again over four turns, another client sending so many
    requests between any two of theirs. asked: other fields of those."""
    s, sent, found = MiniScheduler(share=FixedShare(0.7)), itertools.count(), 0
    sessions = [context(30, seed) for seed in range(3)]
    for turn, index in itertools.product(range(4), range(3)):
        request = run_turn(s, sessions[index], [turn])
        found += request.prefix_len
        sessions[index] = [*request.full_untruncated_fill_ids, *context(15, seed=turn)]
        for number in itertools.islice(sent, requests):
            prompt, key = flood(number)
            run_turn(s, prompt, [], extra_key=key, **asked)
    return found


def test_a_client_that_floods_with_hints_harms_no_more_than_one_without():
    """Each share that is named is a namespace of its own. Who is done each time makes room."""
    requests = 4
    alone = hits_beside(lambda number: ([], None), 0)
    prompts = hits_beside(lambda number: ([100 + number, *context(59)], None), requests)
    done = hits_beside(lambda number: ([100 + number, *context(59)], None), requests, **DONE)
    shares = hits_beside(
        lambda number: ([100, *context(59)], with_share(None, (number + 1) / 100)), requests
    )
    assert prompts < alone, "the flood presses nobody"
    assert prompts <= shares <= alone
    assert prompts < done <= alone

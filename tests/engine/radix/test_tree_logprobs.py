"""Requests for log-probabilities of a prompt: what they take from the radix tree, and what of the
cached is computed again.
"""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams
from tree_harness import MiniScheduler, run_turn
from tree_requests import Request, context

from kvtier.errors import UsageError
from kvtier_sglang.request_options import asked_of, recomputed_tokens


def asks_for_logprobs(s: MiniScheduler, prompt: list[int], start: int, **state) -> Request:
    """A request for log-probabilities of its prompt from `start` on, looked up as SGLang does."""
    request = Request(prompt, return_logprob=True, logprob_start_len=start, **state)
    key = RadixKey(request.full_untruncated_fill_ids, limit=min(start, len(prompt) - 1))
    request.prefix_len = s.tree.match_prefix(
        MatchPrefixParams(key=key, req=request)
    ).device_prefix_len
    return request


def test_a_request_for_prompt_logprobs_says_what_of_the_cached_is_computed_again():
    s = MiniScheduler()
    run_turn(s, context(60), [1, 2, 3])
    tokens = [*context(60), 1, 2, 3, 9, 9]
    # Its position, what it takes from the cache and what it has to compute again of that.
    for start, taken, again in ((63, 4, 59), (30, 4, 26), (4, 4, 0), (64, 4, 59)):
        request = asks_for_logprobs(s, tokens, start)
        assert (request.prefix_len, recomputed_tokens(request)) == (taken, again)
    assert recomputed_tokens(asks_for_logprobs(s, context(60, seed=4), 50)) == 0
    plain = s.admit(tokens)
    assert (plain.prefix_len, recomputed_tokens(plain)) == (63, 0)


def test_of_several_variants_the_one_that_is_cached_furthest_counts():
    s = MiniScheduler()
    shared = context(40)
    for seed in (1, 2, 3):
        run_turn(s, shared + context(20, seed=seed), [7])
    # The first leaves its siblings in the middle, and they share a branching point since.
    for seed in (1, 2, 3):
        request = asks_for_logprobs(s, [*shared, *context(20, seed=seed), 7, 7], 61)
        assert request.prefix_len + recomputed_tokens(request) == 61


def test_a_request_that_has_begun_does_not_take_its_own_kv_for_cached():
    s = MiniScheduler()
    run_turn(s, context(60), [1, 2, 3])
    for state in ({"already_computed": 30}, {"retracted_stain": True}):
        assert recomputed_tokens(asks_for_logprobs(s, [*context(60), 1, 9], 60, **state)) == 0


EXACT = SamplingParams(custom_params={"kvtier": {"exact": True}})


def test_what_is_computed_again_for_an_exact_answer_leaves_the_tree_with_it():
    s = MiniScheduler()
    run_turn(s, context(60), [1, 2, 3])
    held = s.tree.evictable_size()
    run_turn(s, [*context(60), 1, 2, 3, 9, 9], [4, 5], sampling_params=EXACT)
    assert (s.tree.evictable_size(), max(node.stop for node in s.tree.nodes())) == (held, 63)
    # There is nothing to compute again of a context that nobody has: it stays.
    run_turn(s, context(50, seed=8), [4, 5], sampling_params=EXACT)
    assert s.admit([*context(50, seed=8), 4, 5, 6]).prefix_len == 52


MEASURING = SamplingParams(custom_params={"kvtier": {"measure": True}})


def test_a_request_that_measures_reads_what_is_kept_and_leaves_the_tree_as_it_was():
    s = MiniScheduler()
    run_turn(s, context(60), [1, 2, 3])
    held, told = s.tree.evictable_size(), s.tree.misses.report()
    tokens = [*context(60), 1, 2, 3, 9, 9]
    request = asks_for_logprobs(s, tokens, 63, sampling_params=MEASURING)
    assert (request.prefix_len, recomputed_tokens(request)) == (63, 0)
    run_turn(s, tokens, [4], sampling_params=MEASURING)
    assert (s.tree.evictable_size(), max(node.stop for node in s.tree.nodes())) == (held, 63)
    # Nothing stays of a context that nobody has, either.
    run_turn(s, context(50, seed=8), [4, 5], sampling_params=MEASURING)
    assert s.tree.evictable_size() == held
    # It is no traffic.
    assert s.tree.misses.report() == told


@pytest.mark.parametrize(
    "asked",
    [True, {"exact": 1}, {"exactly": True}, [], "exact", 5, {"exact": True, "measure": True}],
)
def test_what_a_request_asks_of_kvtier_is_checked(asked):
    with pytest.raises(UsageError, match=r"^custom_params.kvtier: expected .*exact"):
        asked_of({"kvtier": asked})


def test_what_is_asked_of_others_asks_nothing_of_kvtier():
    for params in (None, {}, {"other": 1}, {"kvtier": {}}):
        assert asked_of(params) == {}
    assert asked_of({"kvtier": {"exact": True}}) == {"exact": True}

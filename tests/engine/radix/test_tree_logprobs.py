"""Requests for log-probabilities of a prompt: what they take from the radix tree, and what of the
cached is computed again.
"""

from __future__ import annotations

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from tree_harness import MiniScheduler, run_turn
from tree_requests import Request, context

from kvtier_sglang.radix.prompt_logprobs import recomputed_tokens


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

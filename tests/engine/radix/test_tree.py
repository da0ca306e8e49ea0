"""The radix tree with compressed nodes, driven by a miniature scheduler (no model)."""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from tree_harness import MiniScheduler, Request, context, digest, random_tokens, run_turn

from kvtier.retention.scorers import Span
from kvtier.retention.shares import FixedShare, QualityTarget, TokenBudget
from kvtier_sglang.radix.cache import KvtierRadixCache
from kvtier_sglang.radix.prompt_logprobs import recomputed_tokens


def matched(s: MiniScheduler, tokens: list[int]) -> int:
    key = RadixKey(array("q", tokens))
    return s.tree.match_prefix(MatchPrefixParams(key=key)).device_prefix_len


def test_a_finished_turn_keeps_sink_recent_generated_and_one_compensation_entry():
    s = MiniScheduler()
    run_turn(s, context(60), [1, 2, 3])
    (node,) = s.tree.nodes()
    assert node.compressed
    assert (node.dropped.begin, node.dropped.end) == (4, 54)
    assert node.locality_size == 4 + 1 + 6 + 3
    assert matched(s, [*context(60), 1, 2, 3, 9]) == 63


def test_chunked_prefill_ends_as_one_node():
    s = MiniScheduler()
    run_turn(s, context(60), [1, 2], chunk=13)
    assert len(list(s.tree.nodes())) == 1


def test_streaming_prefill_never_holds_the_whole_context():
    s = MiniScheduler(locality_size=60, streaming=True)
    run_turn(s, context(120), [1, 2], chunk=20)
    (node,) = s.tree.nodes()
    assert node.locality_size == 4 + 1 + 6 + 2


def test_each_turn_becomes_a_node_and_drops_only_its_own_span():
    s = MiniScheduler()
    first = [*context(60), 1, 2]
    run_turn(s, context(60), [1, 2])
    run_turn(s, [*first, *context(40, seed=1)], [3, 4])
    spans = sorted((n.start, n.dropped.begin, n.dropped.end) for n in s.tree.nodes())
    assert spans == [(0, 4, 54), (62, 0, 34)]


def test_leaving_a_compressed_node_in_the_middle_recomputes_and_the_next_one_shares():
    s = MiniScheduler()
    shared = context(40)
    run_turn(s, shared + context(20, seed=1), [1])
    other = shared + context(20, seed=2)
    # Only the sink is usable of the compressed node.
    assert s.admit(other).prefix_len == 4
    s.release(s.running[0], checkpoint=False)
    run_turn(s, other, [2])
    third = s.admit(shared + context(20, seed=3))
    assert third.prefix_len == 40, "the learned branch point is shared"
    s.release(third, checkpoint=False)
    # The first session is still there in full.
    assert matched(s, [*shared, *context(20, seed=1), 1]) == 61
    s.check()


def test_leaving_in_the_recent_window_keeps_the_prefix_if_enough_recent_tokens_remain():
    s = MiniScheduler()
    tokens = context(60)
    run_turn(s, tokens, [1])
    assert s.admit([*tokens[:58], 77, 78]).prefix_len == 58
    s.release(s.running[0], checkpoint=False)
    assert s.admit([*tokens[:55], 77, 78]).prefix_len == 4
    s.release(s.running[0], checkpoint=False)
    s.check()


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


def test_a_node_in_use_by_another_request_is_compressed_when_the_last_user_leaves():
    s = MiniScheduler()
    tokens = context(60)
    a = s.admit([*tokens, 5])
    s.extend(a, 100)
    s.checkpoint(a)
    b = s.admit([*tokens, 6])
    assert b.prefix_len == 60
    s.extend(b, 100)
    s.checkpoint(b)
    s.release(a, checkpoint=True)
    shared = next(n for n in s.tree.nodes() if n.start == 0)
    assert not shared.compressed
    s.check()
    s.release(b, checkpoint=True)
    assert shared.compressed
    s.check()


def test_duplicates_of_requests_running_together_are_freed():
    s = MiniScheduler()
    tokens = context(50)
    a, b = s.admit([*tokens, 5]), s.admit([*tokens, 6])
    for request in (a, b):
        s.extend(request, 100)
    for request in (a, b):
        s.checkpoint(request)
        s.check()
    assert s.allocator.size - s.allocator.available_size() == 52


def test_eviction_gives_back_both_classes():
    s = MiniScheduler()
    run_turn(s, context(60), [1, 2])
    s.tree.evict(EvictParams(num_tokens=1))
    s.check()
    assert s.allocator.available_size() == s.allocator.size
    assert s.allocator.locality_available_size() == s.allocator.locality_size


def test_flush_forgets_everything():
    s = MiniScheduler()
    run_turn(s, context(60), [1, 2])
    s.tree.reset()
    s.allocator.clear()
    s.check()
    assert matched(s, context(60)) == 0


def test_an_aborted_prefill_is_compressed_so_that_it_does_not_push_out_others():
    s = MiniScheduler()
    request = s.admit(context(200))
    s.extend(request, 120)
    s.checkpoint(request)
    s.release(request, checkpoint=False, aborted=True)
    s.check()
    (node,) = s.tree.nodes()
    assert node.compressed
    assert node.locality_size == 4 + 1 + 6


def test_a_prefill_that_is_aborted_before_its_chunk_is_published_gives_its_slots_back():
    s = MiniScheduler()
    request = s.admit(context(200))
    s.extend(request, 60)
    s.checkpoint(request)
    s.extend(request, 60)
    s.release(request, checkpoint=False, aborted=True)
    s.check()
    assert sum(len(node.key) for node in s.tree.nodes()) == 60


def test_a_retracted_request_finds_its_exact_kv_again():
    s = MiniScheduler()
    request = s.admit(context(100))
    s.extend(request, 100)
    s.checkpoint(request)
    s.release(request, checkpoint=False)
    (node,) = s.tree.nodes()
    assert not node.compressed
    assert s.admit(context(100)).prefix_len == 99


def test_touching_a_prefix_saves_it_from_eviction():
    s = MiniScheduler()
    for seed in range(3):
        run_turn(s, context(60, seed=seed), [1])
    s.tree.touch_prefix(RadixKey(array("q", [*context(60, seed=0), 1, 9])))
    s.tree.evict(EvictParams(num_tokens=1))
    assert matched(s, context(60, seed=0)) == 60
    assert matched(s, context(60, seed=1)) == 0


def test_the_same_prompt_computed_again_from_scratch_is_kept_once():
    s = MiniScheduler(size=1000, locality_size=700)
    for _ in range(5):
        request = s.admit(context(60))
        s.tree.unlock(request.lock)
        # As a request that wants the log-probabilities of its whole prompt: no prefix is used.
        request.filled = request.prefix_len = request.kv.cache_protected_len = 0
        request.last_node = s.tree.root_node
        request.lock = s.tree.lock(request.last_node)
        s.extend(request, 60)
        s.checkpoint(request)
        s.release(request, checkpoint=True)
        s.check()
    assert s.allocator.size - s.allocator.available_size() <= 2 * 60


def test_a_streaming_session_that_outgrew_its_pool_is_recomputed_instead_of_stuck():
    s = MiniScheduler(size=600, locality_size=60, streaming=True)
    tokens = context(30)
    for turn in range(8):
        request = s.admit(tokens)
        assert request is not None, f"turn {turn} was never admitted"
        while request.filled < len(tokens):
            assert s.extend(request, 12)
            s.checkpoint(request)
        for token in range(6):
            assert s.decode(request, token)
        s.release(request, checkpoint=True)
        s.check()
        tokens = [*request.full_untruncated_fill_ids, *context(5, seed=turn)]


def test_a_share_of_the_context_gives_its_ca_slots_back():
    s = MiniScheduler(share=FixedShare(0.4))
    run_turn(s, context(60), [1, 2, 3])
    node = next(s.tree.nodes())
    # 40% of 60 prompt tokens, the protected sink (4) and recent (6) among them, and the answer.
    assert node.ca_size == 24 + 3
    assert s.allocator.available_size() == s.allocator.size - node.ca_size
    assert s.tree.evictable_size() == node.ca_size
    assert matched(s, [*context(60), 1, 2, 3]) == 63
    assert s.tree.compressor.retention.report()["retained_share"] == pytest.approx(24 / 60)


def test_the_best_tokens_of_a_span_are_those_that_stay():
    s = MiniScheduler(share=FixedShare(0.4))
    run_turn(s, context(60), [1])
    node = next(s.tree.nodes())
    tokens, span = context(60), node.dropped
    values = torch.tensor([digest(tokens[: p + 1]) for p in range(span.begin, span.end)])
    kv = Span(values[None, :, None].expand(1, -1, 2), (values % 97)[None, None])
    scores = s.tree.compressor.selection.scorer.score(kv)
    best = scores[0].topk(14).indices.sort().values
    kept = node.value[span.begin : span.begin + 14]
    assert torch.equal(s.pool.ca[1].k[kept, 0, 0], values[best])


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
    assert first.ca_size == 50
    # Nothing is left of the budget: the recent window and one entry stay.
    assert second.ca_size == 6 + 1


def test_without_a_curve_everything_is_kept():
    s = MiniScheduler(share=QualityTarget(0.9, NoCurve()))
    run_turn(s, context(60), [])
    assert next(s.tree.nodes()).ca_size == 60
    assert s.tree.compressor.retention.reasons == {"no-curve": 1}


class NoCurve:
    def curve(self):
        return None


@pytest.mark.parametrize("share", [None, FixedShare(0.4)], ids=["whole", "share"])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_leaks_in_500_random_operations(seed, streaming, share):
    """Arrivals, chunks, decodes, ends, aborts, forks inside nodes, evictions, flushes, and two
    pools too small for all of it; every invariant after every operation."""
    rng = random.Random(seed)
    s = MiniScheduler(size=300, locality_size=160, streaming=streaming, share=share)
    history: list[list[int]] = [random_tokens(rng, 30)]
    for _ in range(500):
        operation = rng.random()
        if operation < 0.25 or not s.running:
            base = rng.choice(history)
            cut = rng.randrange(len(base) + 1) if rng.random() < 0.4 else len(base)
            prompt = base[:cut] + random_tokens(rng, rng.randrange(1, 40))
            s.admit(prompt[:200])
        elif operation < 0.55:
            request = rng.choice(s.running)
            if s.extend(request, rng.randrange(1, 50)):
                s.checkpoint(request)
        elif operation < 0.75:
            request = rng.choice(s.running)
            if request.filled == len(request.full_untruncated_fill_ids):
                s.decode(request, rng.randrange(3))
        elif operation < 0.92:
            request = rng.choice(s.running)
            complete = request.filled == len(request.full_untruncated_fill_ids)
            s.release(request, checkpoint=complete, aborted=rng.random() < 0.5)
            if complete:
                history.append(list(request.full_untruncated_fill_ids))
        elif operation < 0.97:
            s.tree.evict(EvictParams(num_tokens=rng.randrange(1, 60)))
        else:
            while s.running:
                s.release(s.running[0], checkpoint=False)
            s.tree.reset()
            s.allocator.clear()
        s.check()
    assert s.tree.compressor.counters["compressed_nodes"] > 0
    assert (s.tree.compressor.counters["compacted_tokens"] > 0) == (share is not None)
    while s.running:
        s.release(s.running[0], checkpoint=False)
    s.tree.evict(EvictParams(num_tokens=10_000))
    s.check()
    assert s.allocator.available_size() == s.allocator.size
    assert s.allocator.locality_available_size() == s.allocator.locality_size


def test_sglang_sees_one_class_of_ours_over_one_tree():
    chain = KvtierRadixCache.__mro__
    ours = [kind for kind in chain if kind.__module__.startswith("kvtier")]
    assert len(ours) == 2
    assert chain[2] is RadixCache

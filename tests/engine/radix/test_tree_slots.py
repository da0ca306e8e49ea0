"""Slots of the radix tree: they come back from evictions, flushes, aborts, retractions and
duplicates, and nothing leaks in random operations.
"""

from __future__ import annotations

import random
from array import array

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from thorough import THOROUGH
from tree_harness import MiniScheduler, matched, run_turn
from tree_requests import context, random_tokens

from kvtier.retention.shares import PAGE, FixedShare
from kvtier_sglang.radix import matching


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


def test_eviction_gives_all_slots_back():
    s = MiniScheduler()
    run_turn(s, context(60), [1, 2])
    s.tree.evict(EvictParams(num_tokens=1))
    s.check()
    assert s.allocator.available_size() == s.allocator.size


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
    # The 110 dropped tokens leave seven pages of the anchored head and five others: two bundles of
    # six.
    assert node.num_slots == 4 + 2 * PAGE + 6


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
    s = MiniScheduler(size=1000)
    for _ in range(5):
        request = s.admit(context(60))
        s.tree.unlock(request.lock)
        # A request that wants the log-probabilities of its whole prompt uses no prefix.
        request.filled = request.prefix_len = request.kv.cache_protected_len = 0
        request.last_node = s.tree.root_node
        request.lock = s.tree.lock(request.last_node)
        s.extend(request, 60)
        s.checkpoint(request)
        s.release(request, checkpoint=True)
        s.check()
    assert s.allocator.size - s.allocator.available_size() <= 2 * 60


@pytest.mark.parametrize(
    ("share", "adaptive", "longer", "bits"),
    [
        (None, False, 1, None),
        (FixedShare(0.4), False, 1, None),
        (FixedShare(0.4), True, 1, None),
        (FixedShare(0.4), True, 4, None),
        (FixedShare(0.4), True, 4, 8),
    ],
    ids=["whole", "share", "adaptive", "cuts", "codes"],
)
@pytest.mark.parametrize("seed", range(6 if THOROUGH else 2))
def test_nothing_leaks_in_500_random_operations(monkeypatch, seed, share, adaptive, longer, bits):
    """Arrivals, chunks, decodes, ends, aborts, forks inside nodes, evictions, flushes, and a
    pool too small for all of it; every invariant after every operation."""
    for name, tokens in (("CUT_WINDOW", 4), ("WIDE_CUT_WINDOW", 8), ("LEAST_CUT", 6)):
        monkeypatch.setattr(matching, name, tokens)
    rng = random.Random(seed)
    s = MiniScheduler(size=300 * longer, share=share, adaptive=adaptive, bits=bits)
    history: list[list[int]] = [random_tokens(rng, 30 * longer)]
    for _ in range(500):
        operation = rng.random()
        if operation < 0.25 or not s.running:
            base = rng.choice(history)
            cut = rng.randrange(len(base) + 1) if rng.random() < 0.4 else len(base)
            prompt = base[:cut] + random_tokens(rng, rng.randrange(1, 40 * longer))
            s.admit(prompt[: 200 * longer])
        elif operation < 0.55:
            request = rng.choice(s.running)
            if s.extend(request, rng.randrange(1, 50 * longer)):
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
            s.tree.evict(EvictParams(num_tokens=rng.randrange(1, 60 * longer)))
        else:
            while s.running:
                s.release(s.running[0], checkpoint=False)
            s.tree.reset()
            s.allocator.clear()
        s.check()
    assert s.tree.compressor.counters["compressed_nodes"] > 0
    assert s.tree.compressor.counters["compacted_tokens"] > 0
    assert longer == 1 or s.tree.counters["cut_spans"] > 0
    while s.running:
        s.release(s.running[0], checkpoint=False)
    s.tree.evict(EvictParams(num_tokens=10_000))
    s.check()
    assert s.allocator.available_size() == s.allocator.size

"""The radix tree: where contexts may part, what requests for log-probabilities take of it, and what
becomes of slots; nothing leaks in random operations. Answers over it are in tests/engine/serving.
"""

from __future__ import annotations

import random
from array import array

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams
from thorough import THOROUGH
from tree_harness import MEMORY_KEY, MiniScheduler, matched, random_life, run_turn
from tree_requests import Request, context, random_tokens

from kvtier.errors import UsageError
from kvtier.retention.shares import PAGE, FixedShare
from kvtier_sglang.radix import matching
from kvtier_sglang.request_options import asked_of


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


def asks_for_logprobs(s: MiniScheduler, prompt: list[int], start: int, **state) -> Request:
    """A request for log-probabilities of its prompt from `start` on, looked up as SGLang does."""
    request = Request(prompt, return_logprob=True, logprob_start_len=start, **state)
    key = RadixKey(request.full_untruncated_fill_ids, limit=min(start, len(prompt) - 1))
    request.prefix_len = s.tree.match_prefix(
        MatchPrefixParams(key=key, req=request)
    ).device_prefix_len
    return request


def test_of_what_is_cached_a_request_is_told_what_it_computes_again():
    """The one of several variants counts that is cached furthest. A request that has begun is told
    of nothing, as it would take its own KV for cached."""
    s = MiniScheduler()
    shared = context(40)
    for seed in (1, 2, 3):
        run_turn(s, shared + context(20, seed=seed), [7])
    # The first leaves its siblings in the middle, and they share a branching point since.
    for seed in (1, 2, 3):
        prompt = [*shared, *context(20, seed=seed), 7, 7]
        request = asks_for_logprobs(s, prompt, 61)
        assert request.prefix_len + request.kvtier_recomputed == 61
        for state in ({"already_computed": 30}, {"retracted_stain": True}):
            again = asks_for_logprobs(s, prompt, 61, **state)
            assert getattr(again, "kvtier_recomputed", 0) == 0


@pytest.mark.parametrize(("asked", "of_others"), [("exact", 52), ("measure", 0)])
def test_what_is_computed_beside_the_sessions_leaves_the_tree_as_it_was(asked, of_others):
    """There is nothing to compute again of a context that nobody has. An exact answer leaves it in
    the tree, and what measures does not, as it is no traffic."""
    asking = {"sampling_params": SamplingParams(custom_params={"kvtier": {asked: True}})}
    s = MiniScheduler()
    run_turn(s, context(60), [1, 2, 3])
    held, told = s.tree.evictable_size(), s.tree.misses.report()
    run_turn(s, [*context(60), 1, 2, 3, 9, 9], [4, 5], **asking)
    assert (s.tree.evictable_size(), max(node.stop for node in s.tree.nodes())) == (held, 63)
    run_turn(s, context(50, seed=8), [4, 5], **asking)
    assert (s.tree.misses.report() == told) == (asked == "measure")
    assert s.admit([*context(50, seed=8), 4, 5, 6]).prefix_len == of_others


@pytest.mark.parametrize(
    "asked",
    [True, {"exact": 1}, {"exactly": True}, [], "exact", 5, {"exact": True, "measure": True}],
)
def test_what_a_request_asks_of_kvtier_is_checked(asked):
    with pytest.raises(UsageError, match=r"^custom_params.kvtier: expected .*exact"):
        asked_of({"kvtier": asked})
    for params in (None, {}, {"other": asked}, {"kvtier": {}}):
        assert asked_of(params) == {}


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
@pytest.mark.parametrize("seed", range(6 if THOROUGH else 1))
def test_nothing_leaks_in_a_random_life(monkeypatch, seed, share, adaptive, longer, bits):
    """Contexts fork inside nodes, in a pool too small for all of them."""
    for name, tokens in (("CUT_WINDOW", 4), ("WIDE_CUT_WINDOW", 8), ("LEAST_CUT", 6)):
        monkeypatch.setattr(matching, name, tokens)
    rng = random.Random(seed)
    s = MiniScheduler(size=300 * longer, share=share, adaptive=adaptive, bits=bits)
    history = [random_tokens(rng, 30 * longer)]

    def prompt() -> list[int]:
        base = rng.choice(history)
        cut = rng.randrange(len(base) + 1) if rng.random() < 0.4 else len(base)
        return [*base[:cut], *random_tokens(rng, rng.randrange(1, 40 * longer))][: 200 * longer]

    random_life(s, rng, history, prompt, 50 * longer, flushes=True)
    assert s.tree.compressor.counters["compressed_nodes"] > 0
    assert s.tree.compressor.counters["compacted_tokens"] > 0
    assert longer == 1 or s.tree.counters["cut_spans"] > 0


@pytest.mark.parametrize("packs", [False, True], ids=["nothing is compressed", "a share"])
@pytest.mark.parametrize("seed", range(6 if THOROUGH else 1))
def test_nothing_leaks_in_a_random_life_behind_a_memory(monkeypatch, seed, packs):
    """The node of the memory's prefix holds nothing, and goes and comes back like any other."""
    rng = random.Random(seed)
    prefix = [7, *random_tokens(rng, 20)]
    share = FixedShare(0.4) if packs else None
    s = MiniScheduler(size=300, share=share, packs=packs, memory=prefix)
    admit = s.admit

    def behind(prompt: list[int]) -> Request | None:
        return admit(prompt, extra_key=MEMORY_KEY if prompt[0] == 7 else None)

    monkeypatch.setattr(s, "admit", behind)
    history = [prefix, random_tokens(rng, 30)]

    def prompt() -> list[int]:
        return [*rng.choice(history), *random_tokens(rng, rng.randrange(1, 40))][:200]

    random_life(s, rng, history, prompt, 50, flushes=True)
    assert packs == (s.tree.compressor.counters["compacted_tokens"] > 0)

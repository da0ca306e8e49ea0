"""The tree's part of a text that was edited: found, copied, and told apart. That the answers are
those of transformers over the same entries is in tests/engine/serving/test_cut_answers.py.
"""

from __future__ import annotations

import random
from array import array

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams
from thorough import THOROUGH
from tree_harness import MiniScheduler, matched, random_life, run_turn
from tree_requests import context, random_tokens
from waiting import SAFETY_S

from kvtier.retention.shares import FixedShare
from kvtier_sglang.radix import cache, edits
from kvtier_sglang.radix.index import TokenIndex
from kvtier_sglang.radix.node import KvNode


def scheduler(reuse: int | None = 24, **settings) -> MiniScheduler:
    share = FixedShare(0.4)
    return MiniScheduler(**{"size": 2000, "share": share, "adaptive": True} | settings, reuse=reuse)


@pytest.mark.parametrize(
    ("settings", "other"),
    [
        ({"reuse": None}, {}),
        # One entry of a locality head stands for all tokens of a turn.
        ({"adaptive": False}, {}),
        ({}, {"extra_key": "b"}),
        ({}, {"cache_salt": "b"}),
    ],
    ids=["not asked for", "a profile", "another key", "another salt"],
)
def test_what_may_not_be_moved_is_computed_again(small, settings, other):
    s = scheduler(**settings)
    old = context(300)
    run_turn(s, old, [1])
    request = s.admit([77, *old[20:], 5], **other)
    assert request.prefix_len == 0
    s.extend(request, 1000)
    assert request.filled == 282
    assert s.tree.counters["moved_tokens"] == 0


def test_a_request_that_wants_exact_kv_takes_nothing_that_moved(small):
    s = scheduler()
    old = context(300)
    run_turn(s, old, [1])
    edited = [77, *old[20:], *context(20, seed=5)]
    run_turn(s, edited, [2])
    assert s.tree.counters["moved_tokens"] > 0
    asked = s.admit(edited, return_logprob=True, logprob_start_len=len(edited) - 1)
    assert asked.prefix_len == 2, "the new token, and the one behind it that was computed again"
    s.release(asked, checkpoint=False, aborted=True)
    s.check()


@pytest.mark.parametrize(("bits", "most"), [(None, edits.MOST_TURNS), (8, edits.MOST_CODINGS)])
def test_what_was_turned_too_often_is_computed_again(small, monkeypatch, bits, most):
    """A clock that is a token longer every time. Ones as long turn nothing, but behind the first of
    them codes are written anew.
    """
    if bits is None:
        monkeypatch.setattr(edits, "MOST_TURNS", most := 5)
    s = scheduler(bits=bits)
    old, moved = context(300), []
    for turn in range(2 * most + 2):
        before = s.tree.counters["moved_tokens"]
        run_turn(s, [*range(100, 100 + turn), *old, turn], [1])
        moved.append(s.tree.counters["moved_tokens"] - before > 0)
        # Nothing else has it.
        while len(s.tree.evictable_leaves) > 1:
            s.tree.evict(EvictParams(num_tokens=1))
    again = most + 1
    assert moved == [turn % again != 0 for turn in range(len(moved))]
    before = s.tree.counters["moved_tokens"]
    for turn in range(2 * most + 1):
        run_turn(s, [200 + turn, *range(100, 98 + len(moved)), *old, turn], [1])
        # A token is computed again behind the first one. To code the rest anew once more would be
        # once too often.
        is_worn = turn == 0 and bits is not None
        assert (s.tree.counters["moved_tokens"] == before) == is_worn
        before = s.tree.counters["moved_tokens"]
        while len(s.tree.evictable_leaves) > 1:
            s.tree.evict(EvictParams(num_tokens=1))


def test_a_text_that_was_edited_makes_room_before_older_ones(small):
    """It leaves what others use, or have standing on it."""
    s = scheduler()
    shared, other, old = context(100, seed=4), context(90, seed=6), context(300)
    run_turn(s, other, [1])
    run_turn(s, [*shared, *other], [2])
    run_turn(s, [*shared, *old], [3])
    edited = [*shared, 77, *old[20:], 3, 9]
    run_turn(s, edited, [4])
    s.tree.evict(EvictParams(num_tokens=1))
    texts = [other, [*shared, *other], edited]
    assert [matched(s, ids) for ids in texts] == [len(ids) for ids in texts]
    assert matched(s, [*shared, *old]) <= len(shared)
    s.check()


def test_a_text_that_is_quoted_makes_no_room_before_older_ones(small):
    """Another context has its beginning, behind something else."""
    s = scheduler()
    first, older = context(300), context(90, seed=6)
    run_turn(s, older, [1])
    run_turn(s, first, [2])
    run_turn(s, [77, *first[:200], *context(20, seed=5)], [3])
    assert s.tree.counters["moved_tokens"] > 0
    s.tree.evict(EvictParams(num_tokens=1))
    assert (matched(s, older), matched(s, first)) == (0, len(first))
    s.check()


def test_a_request_may_have_forgotten_what_it_edited(small):
    """All that stands on it goes, too, but for what another request reads."""
    s = scheduler()
    old, shared = context(300), context(100, seed=4)
    run_turn(s, [*shared, *old], [1])
    run_turn(s, [*shared, *old, 1, *context(50, seed=5)], [2])
    run_turn(s, [*shared, *context(90, seed=6)], [3])
    edited = [*shared, 77, *old[20:], 9]
    forgetting = {"sampling_params": SamplingParams(custom_params={"kvtier": {"forget": True}})}
    request = run_turn(s, edited, [4], **forgetting)
    assert s.tree.counters["moved_tokens"] == 0
    assert s.tree.counters["forgotten_tokens"] > 300
    assert matched(s, [*shared, *old]) < 120
    assert matched(s, [*shared, *context(90, seed=6), 3]) == 191
    assert matched(s, edited) == len(edited)
    assert request.filled == len(edited) + 1


def test_a_text_of_one_token_is_remembered_once_and_looked_at_once():
    root, known = KvNode(), TokenIndex()
    for token in range(3):
        node = KvNode()
        node.key, node.start = RadixKey(array("q", [token] * 20_000)), 0
        root.attach(node)
        known.add(node)
    places = [
        place for held in known._places.values() for nodes in held.values() for place in nodes
    ]
    assert len(places) <= 3
    request = [token for _ in range(200) for token in (*[0] * 70, 7, *[1] * 70, 8, *[2] * 70, 9)]
    assert known.runs(RadixKey(array("q", request)), 0, 256) == []


@pytest.mark.parametrize(
    ("bits", "with_tier"),
    [(None, False), (8, True), *([(None, True), (8, False)] if THOROUGH else [])],
)
@pytest.mark.parametrize("seed", range(8 if THOROUGH else 1))
def test_nothing_leaks_in_a_random_life_of_edited_contexts(small, connect, seed, bits, with_tier):
    """In a pool too small for all of them. Each entry is of its token."""
    rng = random.Random(seed)
    behind = {"link": connect(), "span_tokens": 16, "patience_s": SAFETY_S} if with_tier else {}
    s = scheduler(size=900, bits=bits, **behind)
    history = [random_tokens(rng, 120)]
    random_life(s, rng, history, lambda: edited_at_random(rng, rng.choice(history[-8:]))[:400], 200)
    assert s.tree.counters["moved_tokens"] > 0
    if with_tier:
        assert s.tree.counters["edited_contexts_restored"] > 0
    assert s.tree.index._places == s.tree.index._nodes == {}


def everything_evicted(s: MiniScheduler) -> None:
    assert s.tree.tier.link.flush(SAFETY_S)
    s.tree.evict(EvictParams(num_tokens=10_000))
    assert not list(s.tree.nodes())


def test_a_context_that_comes_back_as_it_was_is_no_edit(small, connect):
    s = scheduler(link=connect(), span_tokens=16, patience_s=SAFETY_S)
    old = context(300)
    run_turn(s, old, [1, 2])
    everything_evicted(s)
    request = s.admit([*old, 1, 2, *context(20, seed=5)])
    assert request.prefix_len == request.restored == 302
    assert s.tree.counters["moved_tokens"] == 0


@pytest.mark.parametrize(
    ("other", "is_forgotten"),
    [
        ({"cache_salt": "b"}, False),
        ({"sampling_params": SamplingParams(custom_params={"kvtier": {"exact": True}})}, False),
        ({"sampling_params": SamplingParams(custom_params={"kvtier": {"forget": True}})}, True),
    ],
    ids=["namespace", "exact", "forget"],
)
def test_who_may_not_have_what_was_evicted_does_not_get_it(small, connect, other, is_forgotten):
    s = scheduler(link=connect(), span_tokens=16, patience_s=SAFETY_S)
    old = context(300)
    run_turn(s, old, [1])
    everything_evicted(s)
    remembered = set(s.tree.evicted._nodes)
    request = s.admit([77, *old[20:], 5], **other)
    assert s.tree.evicted._nodes.keys() == (set() if is_forgotten else remembered)
    while request.filled < len(request.prompt):
        s.extend(request, 1000)
        s.checkpoint(request)
    assert s.tree.counters["moved_tokens"] == s.tree.tier.report().get("restored_tokens", 0) == 0


def test_of_evicted_contexts_the_newest_are_remembered(small, connect, monkeypatch):
    monkeypatch.setattr(cache, "MOST_EVICTED_TOKENS", 400)
    s = scheduler(link=connect(), span_tokens=16, patience_s=SAFETY_S)
    for seed in (0, 1):
        run_turn(s, context(300, seed=seed), [1])
        everything_evicted(s)
    for seed, found in ((1, True), (0, False)):
        before = s.tree.counters["moved_tokens"]
        run_turn(s, [77, *context(300, seed=seed)[20:], 5], [2])
        assert (s.tree.counters["moved_tokens"] > before) == found
        everything_evicted(s)


def edited_at_random(rng: random.Random, base: list[int]) -> list[int]:
    """Change, put in, or take out up to three texts, and add a new end."""
    for _ in range(rng.randrange(4)):
        begin = rng.randrange(len(base) + 1)
        new, gone = random_tokens(rng, rng.randrange(8)), rng.randrange(30)
        base = [*base[:begin], *new, *base[begin + gone :]]
    return [*base, *random_tokens(rng, rng.randrange(1, 60))]


def test_a_run_is_copied_once_for_two_requests(small):
    s = scheduler()
    old = context(300)
    run_turn(s, old, [1])
    edited = [*old[:100], 77, *old[120:], 5]
    one, two = s.admit(edited), s.admit(edited)
    for request in (one, two):
        s.extend(request, 1000)
        s.checkpoint(request)
    assert s.tree.counters["moved_tokens"] == 179
    s.check()
    assert matched(s, edited) == 281

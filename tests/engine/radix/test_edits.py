"""The tree's part of a text that was edited: found, copied, and told apart."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams
from thorough import THOROUGH
from tree_harness import MiniScheduler, matched, run_turn
from tree_requests import context, random_tokens
from waiting import SAFETY_S

from kvtier.retention.shares import FixedShare
from kvtier_sglang.radix import cache, edits, index
from kvtier_sglang.radix.index import TokenIndex
from kvtier_sglang.radix.node import KvNode


def scheduler(reuse: int | None = 24, **settings) -> MiniScheduler:
    share = FixedShare(0.4)
    return MiniScheduler(**{"size": 2000, "share": share, "adaptive": True} | settings, reuse=reuse)


def test_what_stood_behind_an_edit_is_not_computed_again(small):
    s = scheduler()
    old = context(300)
    run_turn(s, old, [1, 2])
    edited = [*old[:100], 77, 78, 79, *old[120:], *context(20, seed=5)]
    request = s.admit(edited)
    assert request.prefix_len == 96, "a window before the edit is computed again"
    s.extend(request, 1000)
    assert request.filled == 106, "behind the new tokens as many are computed again"
    s.checkpoint(request)
    assert request.filled == 103 + 180
    s.check()
    assert s.extend(request, 1000)
    s.release(request, checkpoint=True)
    s.check()
    assert s.tree.counters["moved_tokens"] == 177


def test_what_stood_behind_a_text_that_was_taken_out_is_matched_at_once(small):
    s = scheduler()
    first, second = context(120), context(150, seed=1)
    run_turn(s, first, [1, 2])
    run_turn(s, [*first, 1, 2, *second], [3, 4])
    third = context(100, seed=2)
    run_turn(s, [*first, 1, 2, *second, 3, 4, *third], [5])
    shorter = [*first, 1, 2, *third, 5, *context(9, seed=3)]
    request = s.admit(shorter)
    assert request.prefix_len == 122 + 101
    s.release(request, checkpoint=False)
    # The next one matches the copies.
    before = s.tree.counters["moved_tokens"]
    request = s.admit(shorter)
    assert (request.prefix_len, s.tree.counters["moved_tokens"]) == (223, before)
    s.check()


def test_what_a_profile_keeps_is_computed_again(small):
    """One entry of a locality head stands for all tokens of a turn."""
    s = scheduler(adaptive=False)
    old = context(300)
    run_turn(s, old, [1])
    run_turn(s, [77, *old[20:], 5], [2])
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


@pytest.mark.parametrize("other", [{"extra_key": "b"}, {"cache_salt": "b"}])
def test_nothing_is_found_in_another_namespace(small, other):
    s = scheduler()
    old = context(300)
    run_turn(s, old, [1])
    run_turn(s, [77, *old[20:], 5], [2], **other)
    assert s.tree.counters["moved_tokens"] == 0


def test_without_reuse_everything_behind_an_edit_is_computed(small):
    s = scheduler(reuse=None)
    old = context(300)
    run_turn(s, old, [1])
    request = s.admit([77, *old[20:], 5])
    assert request.prefix_len == 0
    s.extend(request, 1000)
    assert request.filled == 282


EDIT = st.tuples(
    st.integers(0, 80), st.integers(0, 80), st.lists(st.integers(0, 2), max_size=9)
)  # fmt: skip


@given(
    paths=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=80), min_size=1, max_size=4),
    edit=EDIT,
    where=st.integers(0, 3),
    least=st.integers(6, 30),
)
def test_runs_are_where_they_are_said_to_be(paths, edit, where, least):
    """The runs are right whatever repeats itself in paths and requests."""
    with every_window():
        found_runs(paths, edited_by(paths[where % len(paths)], edit), least)


@given(
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=4),
    edit=EDIT,
    where=st.integers(0, 3),
    least=st.integers(6, 30),
)
def test_runs_are_found_wherever_they_stand(lengths, edit, where, least):
    """The index finds as many tokens as a search of all places, where every window is remembered
    and none is twice in a path."""
    paths = [context(tokens, seed=seed) for seed, tokens in enumerate(lengths)]
    request = edited_by(paths[where % len(paths)], edit)
    with every_window():
        at = 0
        for run in found_runs(paths, request, least):
            assert longest(paths, request[at : run.begin]) < least or run.begin == at
            at = run.stop
        assert longest(paths, request[at:]) < least


def test_a_text_of_one_token_is_remembered_once_and_looked_at_once():
    root, known = KvNode(), TokenIndex()
    for token in range(3):
        hang(root, [token] * 20_000, known)
    places = [
        place for held in known._places.values() for nodes in held.values() for place in nodes
    ]
    assert len(places) <= 3
    request = [token for _ in range(200) for token in (*[0] * 70, 7, *[1] * 70, 8, *[2] * 70, 9)]
    assert known.runs(key(request), 0, 256) == []


@contextmanager
def every_window() -> Iterator[None]:
    """Windows of six tokens, all of which are remembered, wherever they stand."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("WINDOW", 6), ("SAMPLED", 1), ("MOST_COMPARED", 1000)):
            patch.setattr(index, name, value)
        yield


def edited_by(base: list[int], edit: tuple[int, int, list[int]]) -> list[int]:
    begin, gone, new = edit
    return [*base[:begin], *new, *base[begin + gone :]]


def found_runs(paths: list[list[int]], request: list[int], least: int) -> list[index.Run]:
    """The runs of a request, each of which is what the path of its node has there."""
    root, known = KvNode(), TokenIndex()
    for ids in paths:
        parent = root
        for part in (ids[: len(ids) // 2], ids[len(ids) // 2 :]):
            if part:
                parent = hang(parent, part, known)
    at, runs = 0, known.runs(key(request), 0, least)
    for run in runs:
        assert at <= run.begin < run.stop <= len(request)
        assert run.stop - run.begin >= least
        nodes = reversed(list(run.node.path()))
        path = [token for node in nodes for token in node.key.token_ids]
        there = slice(run.begin - run.shift, run.stop - run.shift)
        assert path[there] == request[run.begin : run.stop]
        at = run.stop
    return runs


def longest(paths: list[list[int]], ids: list[int]) -> int:
    """Tokens of the longest part of `ids` that a path has."""
    found = 0
    for begin in range(len(ids)):
        while any(
            ids[begin : begin + found + 1] == path[at : at + found + 1]
            for path in paths
            for at in range(len(path) - found)
        ) and begin + found < len(ids):
            found += 1
    return found


def key(ids: list[int]) -> RadixKey:
    return RadixKey(array("q", ids))


def hang(parent: KvNode, ids: list[int], known: TokenIndex) -> KvNode:
    node = KvNode()
    node.key, node.start = key(ids), parent.stop if parent.parent is not None else 0
    parent.attach(node)
    known.add(node)
    return node


@pytest.mark.parametrize("with_tier", [False, True], ids=["alone", "tier"])
@pytest.mark.parametrize("bits", [None, 8], ids=["entries", "codes"])
@pytest.mark.parametrize("seed", range(8 if THOROUGH else 2))
def test_nothing_leaks_in_500_random_operations_with_edits(small, connect, seed, bits, with_tier):
    """Arrivals of edited contexts, chunks, decodes, ends, aborts, evictions, in a pool too small;
    every invariant after every operation, among them that each entry is of its token."""
    rng = random.Random(seed)
    behind = {"link": connect(), "span_tokens": 16, "patience_s": SAFETY_S} if with_tier else {}
    s = scheduler(size=900, bits=bits, **behind)
    history = [random_tokens(rng, 120)]
    for _ in range(500):
        operation = rng.random()
        if operation < 0.3 or not s.running:
            prompt = edited_at_random(rng, rng.choice(history[-8:]))
            s.admit(prompt[:400])
        elif operation < 0.6:
            request = rng.choice(s.running)
            if s.extend(request, rng.randrange(1, 200)):
                s.checkpoint(request)
        elif operation < 0.75:
            request = rng.choice(s.running)
            if request.filled == len(request.full_untruncated_fill_ids):
                s.decode(request, rng.randrange(3))
        elif operation < 0.95:
            request = rng.choice(s.running)
            complete = request.filled == len(request.full_untruncated_fill_ids)
            s.release(request, checkpoint=complete, aborted=rng.random() < 0.5)
            if complete:
                history.append(list(request.full_untruncated_fill_ids))
        else:
            s.tree.evict(EvictParams(num_tokens=rng.randrange(1, 200)))
        s.check()
    assert s.tree.counters["moved_tokens"] > 0
    if with_tier:
        assert s.tree.counters["edited_contexts_restored"] > 0
    while s.running:
        s.release(s.running[0], checkpoint=False)
    s.tree.evict(EvictParams(num_tokens=10_000))
    s.check()
    assert s.allocator.available_size() == s.allocator.size
    assert s.tree.index._places == s.tree.index._nodes == {}


def everything_evicted(s: MiniScheduler) -> None:
    assert s.tree.tier.link.flush(SAFETY_S)
    s.tree.evict(EvictParams(num_tokens=10_000))
    assert not list(s.tree.nodes())


@pytest.mark.parametrize("bits", [None, 8], ids=["entries", "codes"])
def test_what_stood_behind_an_edit_comes_back_from_the_tier(small, connect, bits):
    s = scheduler(bits=bits, link=connect(), span_tokens=16, patience_s=SAFETY_S)
    old = context(300)
    run_turn(s, old, [1, 2])
    everything_evicted(s)
    edited = [*old[:100], 77, 78, 79, *old[120:], *context(20, seed=5)]
    request = s.admit(edited)
    assert request.prefix_len == 96, "as on a device that never lost it"
    s.extend(request, 1000)
    s.checkpoint(request)
    assert request.filled == 103 + 180
    s.check()
    assert s.extend(request, 1000)
    s.release(request, checkpoint=True)
    s.check()
    assert s.tree.tier.report()["restored_requests"] == 1


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


def test_a_context_that_comes_and_goes_is_remembered_once(small, connect):
    s = scheduler(link=connect(), span_tokens=16, patience_s=SAFETY_S)
    ids: list[int] = []
    for turn in range(3):
        ids += context(100, seed=turn)
        run_turn(s, ids, [turn])
        ids += [turn]
        everything_evicted(s)
    remembered = [(node.start, node.stop) for node, _ in s.tree.evicted._nodes.values()]
    assert sorted(remembered) == [(0, 101), (101, 202), (202, 303)]
    assert s.tree.evicted._tokens == 303


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

"""Requests that leave a compressed turn inside what heads keep a part of. That their answers are
those of transformers, whatever is left where, is in tests/engine/serving/test_cut_answers.py.
"""

from __future__ import annotations

import pytest
import torch
from tree_harness import MiniScheduler, matched, run_turn
from tree_requests import context

from kvtier.retention.shares import FixedShare
from kvtier_sglang.radix import matching

WINDOW = 8


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(matching, "CUT_WINDOW", WINDOW)
    monkeypatch.setattr(matching, "WIDE_CUT_WINDOW", 2 * WINDOW)
    monkeypatch.setattr(matching, "LEAST_CUT", 16)


def competing(**asked) -> MiniScheduler:
    return MiniScheduler(size=1200, share=FixedShare(0.5), adaptive=True, **asked)


def left(s: MiniScheduler, prompt: list[int]) -> int:
    """Run a turn and return how many tokens its request finds; it computes and ends."""
    return run_turn(s, prompt, [1, 2], chunk=40).prefix_len


def test_a_branch_computes_a_window_and_the_next_one_nothing():
    s = competing()
    shared = context(200)
    run_turn(s, shared + context(60, seed=1), [1])
    held = s.tree.total_size()
    assert left(s, shared + context(60, seed=2)) == 200 - WINDOW
    grown = s.tree.total_size() - held
    assert s.tree.counters["cut_spans"] == 1
    # The second session holds no more than the window of the shared beginning.
    alone = competing()
    left(alone, context(62 + WINDOW, seed=2))
    assert grown <= alone.tree.total_size() + 2 * 16
    assert left(s, shared + context(60, seed=3)) == 200
    assert s.tree.counters["cut_spans"] == 1
    # All are there.
    for seed in (1, 2, 3):
        assert matched(s, [*shared, *context(60, seed=seed), 1]) == 261


@pytest.mark.parametrize("bits", [None, 8])
def test_while_a_request_reads_a_span_its_beginning_is_copied(bits):
    s = competing(bits=bits)
    tokens = context(200)
    run_turn(s, tokens, [1])
    reader = s.admit([*tokens, 1, 5, 6])
    assert reader.prefix_len == 201
    assert left(s, [*tokens[:150], 7, 8]) == 150 - WINDOW
    assert left(s, [*tokens[:150], 7, 9]) >= 150
    assert s.tree.counters["copied_beginnings"] == 1
    assert not s.tree.counters["cut_spans"]
    read, copied = (
        s.pool.packed.of(node.value[node.dropped.begin :])
        for node in sorted(s.tree.root_node.children.values(), key=lambda node: -node.lock_ref)
    )
    of_both = read.tokens < 150 - WINDOW - 4
    assert torch.equal(read.tokens[of_both], copied.tokens)
    for mine, theirs in zip(*map(s.pool.packed.decoded, (read, copied)), strict=True):
        assert torch.equal(mine[of_both], theirs)
    s.extend(reader, 100)
    s.release(reader, checkpoint=True)
    assert matched(s, [*tokens, 1, 5, 6, 7]) == 203
    s.check()


def test_what_is_too_little_for_a_copy_is_not_evicted():
    s = MiniScheduler(size=400, share=FixedShare(0.5), adaptive=True)
    tokens, other = context(200), context(30, seed=1)
    run_turn(s, tokens, [1])
    run_turn(s, other, [1])
    reader = s.admit([*tokens, *context(s.allocator.available_size() - 40, seed=2)])
    assert s.extend(reader, 400)
    assert s.allocator.available_size() < 48
    for _ in range(2):
        assert matched(s, [*tokens[:150], 7, 8]) == 4
    assert matched(s, [*other, 1]) == 31
    s.release(reader, checkpoint=True)
    assert matched(s, [*tokens[:150], 7, 8]) == 150 - WINDOW
    s.check()


@pytest.mark.parametrize("is_read", [False, True])
def test_without_room_a_span_is_left_where_it_begins(monkeypatch, is_read):
    """It is neither cut nor copied."""
    s = competing()
    tokens = context(200)
    run_turn(s, tokens, [1])
    reader = s.admit([*tokens, 1, 5, 6]) if is_read else None
    monkeypatch.setattr(s.allocator, "alloc_bundles", lambda need: None)
    assert left(s, [*tokens[:150], 7, 8]) == 4
    assert matched(s, [*tokens, 1]) == 201
    monkeypatch.undo()
    if is_read:
        s.extend(reader, 100)
        s.release(reader, checkpoint=True)
    s.check()


def test_a_short_beginning_is_computed_again():
    s = competing()
    tokens = context(200)
    run_turn(s, tokens, [1])
    assert left(s, [*tokens[: 4 + 16 + WINDOW - 1], 7, 8]) == 4

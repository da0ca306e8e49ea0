"""Nodes of the radix tree: what a turn leaves compressed, and where contexts may part."""

from __future__ import annotations

from sglang.srt.mem_cache.radix_cache import RadixCache
from tree_harness import MiniScheduler, matched, run_turn
from tree_requests import context

from kvtier.retention.shares import PAGE
from kvtier_sglang.radix.cache import KvtierRadixCache


def test_a_finished_turn_keeps_sink_recent_generated_and_what_heads_keep_of_the_rest():
    s = MiniScheduler()
    run_turn(s, context(60), [1, 2, 3])
    (node,) = s.tree.nodes()
    assert node.compressed
    assert (node.dropped.begin, node.dropped.end) == (4, 54)
    # The anchored head keeps 50 entries, four pages, and each of five others a page for one: nine
    # pages of six heads take two bundles.
    assert node.num_slots == 4 + 2 * PAGE + 6 + 3
    assert matched(s, [*context(60), 1, 2, 3, 9]) == 63


def test_chunked_prefill_ends_as_one_node():
    s = MiniScheduler()
    run_turn(s, context(60), [1, 2], chunk=13)
    assert len(list(s.tree.nodes())) == 1


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


def test_sglang_sees_one_class_of_ours_over_one_tree():
    chain = KvtierRadixCache.__mro__
    ours = [kind for kind in chain if kind.__module__.startswith("kvtier")]
    assert len(ours) == 2
    assert chain[2] is RadixCache

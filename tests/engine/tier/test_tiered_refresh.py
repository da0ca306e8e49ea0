"""Compacted contexts that are chosen again from the exact KV in the tier."""

from __future__ import annotations

import pytest
import torch
from tiered_tree_harness import REFRESH, turn
from tree_harness import MiniScheduler
from tree_requests import context
from waiting import SAFETY_S

from kvtier.retention.keepkv import KeepKV
from kvtier.retention.refreshing import RefreshRule
from kvtier.retention.shares import FixedShare
from kvtier.tier.client import TierClient
from kvtier.tier.transport.landing import Landing
from kvtier_sglang.refresh.trigger import TriggerRule


def packed_keys(s: MiniScheduler, row: torch.Tensor) -> torch.Tensor:
    """Keys of all packed entries that a row reads, column by column."""
    return torch.cat([s.pool.packed.cells.k[span.cells] for span in s.pool.packed.in_row(row)])


def test_a_turn_reads_entries_of_its_own_and_leaves_the_tree_as_it_was(connect):
    s = MiniScheduler(share=FixedShare(0.5), link=connect(), refresh=REFRESH)
    prompt = context(90)
    turn(s, prompt, [1, 2])
    assert s.tree.tier.link.flush(SAFETY_S)
    before = [node.value.clone() for node in s.tree.nodes()]
    request = s.admit([*prompt, 1, 2, 7, 7, 7])
    assert s.extend(request, 100)
    assert s.tree.refresh.refresher.counters["refreshed_turns"] == 1
    assert s.tree.private_slots > 0
    (pruned,) = s.tree.pruned_ranges(request.rid)
    row = s.rows.req_to_token[request.kv.req_pool_idx, pruned.begin : pruned.end].long()
    held = torch.cat(before)
    assert not torch.isin(row[row > 0], held).any()
    s.check()
    s.checkpoint(request)
    s.check()
    s.release(request, checkpoint=True)
    s.check()
    assert s.tree.private_slots == 0
    assert all(any(n.value.equal(v) for n in s.tree.nodes()) for v in before)


def test_a_tier_that_chooses_by_itself_chooses_the_same(connect):
    prompt = context(90)
    held = []
    for near_data in (False, True):
        s = MiniScheduler(
            share=FixedShare(0.5), link=connect(), refresh=REFRESH, near_data=near_data
        )
        turn(s, prompt, [1, 2])
        assert s.tree.tier.link.flush(SAFETY_S)
        request = s.admit([*prompt, 1, 2, 7, 7, 7])
        assert s.extend(request, 100)
        report = s.tree.report()["tier"]
        assert report["refreshed_turns"] == 1
        row = s.rows.req_to_token[request.kv.req_pool_idx, : request.filled].long()
        entries = packed_keys(s, row)
        held.append((entries, report["refresh_moved_bytes"]))
        s.check()
        s.release(request, checkpoint=True)
        s.check()
        assert s.tree.tier.link.flush(SAFETY_S)
        assert s.tree.tier.link.held_bytes == 0
    (fetched, all_bytes), (near, some_bytes) = held
    assert fetched.equal(near)
    # Half of the tokens of one of three heads in one of two layers, and what was asked.
    assert some_bytes < all_bytes / 4


def chosen_by_now(s: MiniScheduler) -> None:
    """Wait until what is chosen in the background is."""
    for state in s.tree.requests.values():
        ahead = state.refreshing.ahead
        if ahead is not None and ahead.choosing is not None:
            ahead.choosing.result(SAFETY_S)


def generated(s: MiniScheduler, request, count: int) -> list[int]:
    """Return after which tokens the request's entries were others than before."""
    changed = []
    for number in range(count):
        row = s.rows.req_to_token[request.kv.req_pool_idx, : request.filled].long()
        before = packed_keys(s, row)
        assert s.decode(request, number)
        assert s.tree.tier.link.flush(SAFETY_S)
        chosen_by_now(s)
        row = s.rows.req_to_token[request.kv.req_pool_idx, : request.filled - 1].long()
        if not packed_keys(s, row).equal(before):
            changed.append(number)
        s.check()
    return changed


@pytest.mark.parametrize("near_data", [False, True])
def test_every_so_many_tokens_the_newest_queries_reselect(connect, near_data):
    s = MiniScheduler(
        share=FixedShare(0.3),
        link=connect(),
        refresh=REFRESH,
        near_data=near_data,
        again=TriggerRule(every_tokens=4),
    )
    prompt = context(90)
    turn(s, prompt, [1, 2])
    assert s.tree.tier.link.flush(SAFETY_S)
    request = s.admit([*prompt, 1, 2, 7, 7, 7])
    assert s.extend(request, 100)
    # They are asked for with the 4th token, have come and are chosen from with the 5th, and are
    # written with the 6th.
    assert generated(s, request, 16) == [5, 11]
    assert s.tree.refresh.refresher.counters["refreshed_again"] == 2
    assert len(s.tree.requests[request.rid].refreshing.windows[1]) == 16 + 3
    s.release(request, checkpoint=True)
    s.check()
    assert s.tree.private_slots == 0
    assert not s.tree.requests
    assert s.tree.tier.link.flush(SAFETY_S)
    assert s.tree.tier.link.held_bytes == 0


def test_attention_that_has_moved_on_chooses_again_and_attention_that_has_not_does_not(connect):
    for moved, again in ((0.01, 1), (0.99, 0)):
        s = MiniScheduler(
            share=FixedShare(0.3),
            link=connect(),
            refresh=RefreshRule(KeepKV(pool_width=1, window_queries=2), merges=False),
            again=TriggerRule(moved=moved),
        )
        prompt = context(90, seed=int(100 * moved))
        turn(s, prompt, [1, 2])
        assert s.tree.tier.link.flush(SAFETY_S)
        request = s.admit([*prompt, 1, 2, 7, 7, 7])
        assert s.extend(request, 100)
        # The trigger looks with the 8th token for the first time, and with the 16th.
        generated(s, request, 19)
        assert s.tree.refresh.refresher.counters["refreshed_again"] == again
        s.release(request, checkpoint=True)
        s.check()


def test_a_turn_that_began_without_the_tier_is_refreshed_when_it_is_back(connect, monkeypatch):
    s = MiniScheduler(
        share=FixedShare(0.3), link=connect(), refresh=REFRESH, again=TriggerRule(every_tokens=2)
    )
    prompt = context(90)
    turn(s, prompt, [1, 2])
    assert s.tree.tier.link.flush(SAFETY_S)
    with monkeypatch.context() as patch:
        patch.setattr(TierClient, "get", lambda *args: [Landing.MISSING] * len(args[1]))
        request = s.admit([*prompt, 1, 2, 7, 7, 7])
    assert s.extend(request, 100)
    assert s.tree.refresh.refresher.counters["refreshed_turns"] == 0
    assert s.tree.private_slots == 0
    assert generated(s, request, 4) == [3]
    assert s.tree.private_slots > 0
    s.release(request, checkpoint=True)
    s.check()
    assert s.tree.private_slots == 0


def test_a_restored_context_is_refreshed_from_what_it_was_restored_from(connect):
    a = MiniScheduler(share=FixedShare(0.5), link=connect())
    prompt = context(90)
    turn(a, prompt, [1, 2])
    assert a.tree.tier.link.flush(SAFETY_S)
    b = MiniScheduler(share=FixedShare(0.5), link=connect(), refresh=REFRESH)
    assert turn(b, [*prompt, 1, 2, 7, 7, 7], [3]).restored == 92
    assert b.tree.refresh.refresher.counters["refreshed_turns"] == 1
    assert b.tree.tier.link.flush(SAFETY_S)
    assert b.tree.tier.link.held_bytes == 0


def test_a_refresh_without_room_leaves_no_host_memory_held(connect, monkeypatch):
    s = MiniScheduler(share=FixedShare(0.5), link=connect(), refresh=REFRESH)
    turn(s, context(90), [1, 2])
    assert s.tree.tier.link.flush(SAFETY_S)
    monkeypatch.setattr(s.tree.refresh.refresher, "_allocate", lambda refreshing, row: False)
    request = s.admit([*context(90), 1, 2, 7, 7])
    assert s.tree.tier.link.held_bytes > 0
    assert s.extend(request, 100)
    assert s.tree.refresh.refresher.counters["refresh_no_room"] == 1
    assert s.tree.tier.link.held_bytes == 0
    s.check()
    s.release(request, checkpoint=True)
    s.check()

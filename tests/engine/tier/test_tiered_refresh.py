"""Compacted contexts that are chosen again from the exact KV in the tier. That what is chosen is
what the turn's queries ask for is in test_refreshed_answers.py.
"""

from __future__ import annotations

import pytest
import torch
from tiered_tree_harness import REFRESH, turn
from tree_harness import MiniScheduler, matched
from tree_requests import Request, context
from waiting import SAFETY_S

from kvtier.retention.shares import FixedShare
from kvtier.tier.client import TierClient
from kvtier.tier.transport.landing import Landing

PROMPT = context(90)
NEXT = [*PROMPT, 1, 2, 7, 7, 7]


def behind_a_turn(connect, share: float = 0.5, **options) -> MiniScheduler:
    """A server whose tier has a finished turn."""
    options = {"refresh": REFRESH, **options}
    s = MiniScheduler(share=FixedShare(share), link=connect(), **options)
    turn(s, PROMPT, [1, 2])
    assert s.tree.tier.link.flush(SAFETY_S)
    return s


def row_of(s: MiniScheduler, request: Request) -> torch.Tensor:
    return s.rows.req_to_token[request.kv.req_pool_idx, : request.filled].long()


def packed_keys(s: MiniScheduler, row: torch.Tensor) -> torch.Tensor:
    """Keys of all packed entries that a row reads, column by column."""
    return torch.cat([s.pool.packed.cells.k[span.cells] for span in s.pool.packed.in_row(row)])


def release(s: MiniScheduler, request: Request) -> None:
    """End a request, of which nothing is left then but its turn."""
    s.check()
    s.checkpoint(request)
    s.check()
    s.release(request, checkpoint=True)
    s.check()
    assert s.tree.private_slots == 0
    assert not s.tree.requests
    assert s.tree.tier.link.flush(SAFETY_S)
    assert s.tree.tier.link.held_bytes == 0


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_turn_reads_entries_of_its_own_and_leaves_the_tree_as_it_was(connect, adaptive):
    s = behind_a_turn(connect, 0.25, adaptive=adaptive)
    before = [node.value.clone() for node in s.tree.nodes()]
    shared = [packed_keys(s, value) for value in before]
    request = s.admit(NEXT)
    assert s.extend(request, 100)
    assert s.tree.refresh.refresher.counters["refreshed_turns"] == 1
    assert s.tree.private_slots > 0
    (pruned,) = s.tree.pruned_ranges(request.rid)
    row = row_of(s, request)
    own = row[pruned.begin : pruned.end]
    assert not torch.isin(own[own > 0], torch.cat(before)).any()
    assert packed_keys(s, row).shape == torch.cat(shared).shape
    assert not packed_keys(s, row).equal(torch.cat(shared))
    release(s, request)
    for value, keys in zip(before, shared, strict=True):
        assert any(node.value.equal(value) for node in s.tree.nodes())
        assert packed_keys(s, value).equal(keys)


def test_a_turn_whose_kv_does_not_come_back_goes_on_with_the_trees_entries(connect, monkeypatch):
    s = behind_a_turn(connect)
    monkeypatch.setattr(TierClient, "get", lambda *args: [Landing.MISSING] * len(args[1]))
    request = s.admit(NEXT)
    assert s.extend(request, 100)
    report = s.tree.report()["tier"]
    assert report["refresh_missed"] == 1
    assert "refreshed_turns" not in report
    assert s.tree.private_slots == 0
    release(s, request)


@pytest.mark.parametrize(("adaptive", "size"), [(False, 400), (True, 108)])
def test_a_turn_without_room_for_entries_of_its_own_goes_on_with_the_trees(
    connect, monkeypatch, adaptive, size
):
    s = behind_a_turn(connect, adaptive=adaptive, size=size)
    request = s.admit(NEXT)
    assert s.tree.tier.link.held_bytes > 0
    if adaptive:
        hold = s.allocator.alloc(s.allocator.available_size() - 20)
    else:
        monkeypatch.setattr(s.tree.refresh.refresher, "_allocate", lambda refreshing, row: False)
    assert s.extend(request, 100)
    assert s.tree.refresh.refresher.counters["refresh_no_room"] == 1
    assert s.tree.tier.link.held_bytes == 0
    if adaptive:
        s.allocator.free(hold)
    release(s, request)


def test_room_is_made_in_whole_bundles(connect):
    """There are free slots enough, but no sixteen of them follow each other: what rests goes."""
    other = context(150, seed=1)
    s = MiniScheduler(
        size=320, share=FixedShare(0.5), link=connect(), refresh=REFRESH, adaptive=True
    )
    for tokens in (other, PROMPT):
        turn(s, tokens, [1, 2])
    assert s.tree.tier.link.flush(SAFETY_S)
    request = s.admit(NEXT)
    hold = s.allocator.alloc(s.allocator.available_size())
    s.allocator.free(hold[::2])
    assert s.allocator.whole_bundles() == 0
    assert s.allocator.available_size() > 48
    assert s.extend(request, 100)
    assert s.tree.refresh.refresher.counters["refreshed_turns"] == 1
    assert matched(s, other) == 0
    s.allocator.free(hold[1::2])
    release(s, request)

"""Contexts whose heads compete for entries, chosen again from the exact KV in the tier."""

from __future__ import annotations

import pytest
import torch
from packed_checks import SHAPE, AnyOrder
from tiered_tree_harness import REFRESH, turn
from tree_harness import QUERY_SCALE, MiniScheduler, matched
from tree_requests import context, digest
from waiting import SAFETY_S

from kvtier.retention.keepkv import QueryWindow
from kvtier.retention.refreshing import reselect
from kvtier.retention.scorers import Span
from kvtier.retention.shares import FixedShare


def held(s: MiniScheduler, row: torch.Tensor) -> list[list[torch.Tensor]]:
    """First numbers of the keys that every column holds, of each packed span of a row."""
    cells = s.pool.packed.cells
    found = []
    for span in s.pool.packed.in_row(row):
        keys = cells.k[span.cells, 0]
        found.append([
            keys[begin : begin + count]
            for begin, count in zip(span.indptr, span.counts, strict=False)
        ])  # fmt: skip
    return found


def expected_after(s: MiniScheduler, request, pruned, counts, asked: int):
    """The same as one would choose by hand. asked: tokens of the pass that refreshed."""
    tokens = list(request.full_untruncated_fill_ids)
    values = torch.tensor([
        float(digest(tokens[: p + 1])) for p in range(pruned.begin, pruned.end)
    ])  # fmt: skip
    exact = values[None, :, None].expand(SHAPE.num_kv_heads, -1, SHAPE.head_dim)
    found = []
    for layer in range(SHAPE.num_layers):
        state = torch.empty(SHAPE.num_kv_heads, 0, len(values))
        worth = AnyOrder().score(Span(exact, state, pruned.begin, None, exact, layer))
        q = s._queries(request, asked, layer)[-REFRESH.keepkv.window_queries :]
        for head in range(SHAPE.num_kv_heads):
            count = counts[layer * SHAPE.num_kv_heads + head]
            mine = slice(head, head + 1)
            kept = reselect(
                REFRESH.keepkv, exact[mine], exact[mine], worth[head], count,
                QueryWindow(q[:, mine], QUERY_SCALE),
            )  # fmt: skip
            found.append(values[kept])
    return found


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_a_turn_reads_packed_entries_of_its_own_chosen_by_its_queries_too(connect, share):
    s = MiniScheduler(share=FixedShare(share), link=connect(), refresh=REFRESH, adaptive=True)
    prompt = context(90)
    turn(s, prompt, [1, 2])
    assert s.tree.tier.link.flush(SAFETY_S)
    (node,) = s.tree.nodes()
    before = held(s, node.value)
    request = s.admit([*prompt, 1, 2, 7, 7, 7])
    asked = len(request.full_untruncated_fill_ids) - request.filled
    assert s.extend(request, 100)
    counters = s.tree.refresh.refresher.counters
    assert counters["refreshed_turns"] == 1
    assert counters["unrefreshed_layers"] == 0
    row = s.rows.req_to_token[request.kv.req_pool_idx, : request.filled].long()
    (pruned,) = s.tree.pruned_ranges(request.rid)
    (own,) = s.pool.packed.in_row(row)
    assert not torch.isin(own.slots, node.value).any()
    (entries,) = held(s, row)
    expected = expected_after(s, request, pruned, own.counts, asked)
    for mine, wanted, shared in zip(entries, expected, before[0], strict=True):
        torch.testing.assert_close(mine, wanted)
        assert len(mine) == len(shared)
    assert any(not a.equal(b) for a, b in zip(entries, before[0], strict=True))
    s.check()
    for left, right in zip(held(s, node.value)[0], before[0], strict=True):
        assert left.equal(right)
    s.release(request, checkpoint=True)
    s.check()
    assert s.tree.private_slots == 0
    assert s.tree.tier.link.flush(SAFETY_S)
    assert s.tree.tier.link.held_bytes == 0


def test_another_server_restores_the_packed_context_and_refreshes_it(connect):
    link = connect()
    first = MiniScheduler(share=FixedShare(0.4), link=link, refresh=REFRESH, adaptive=True)
    prompt = context(90)
    turn(first, prompt, [1, 2])
    assert link.flush(SAFETY_S)
    (node,) = first.tree.nodes()
    second = MiniScheduler(share=FixedShare(0.4), link=link, refresh=REFRESH, adaptive=True)
    request = second.admit([*prompt, 1, 2, 7, 7, 7])
    assert request.restored > 80
    (restored,) = (n for n in second.tree.nodes() if n.dropped.num_tokens)
    for mine, theirs in zip(
        held(second, restored.value)[0], held(first, node.value)[0], strict=True
    ):
        assert mine.equal(theirs)
    assert second.extend(request, 100)
    assert second.tree.refresh.refresher.counters["refreshed_turns"] == 1
    second.check()
    second.release(request, checkpoint=True)
    second.check()


def test_a_turn_without_room_for_entries_of_its_own_goes_on_with_the_trees(connect):
    s = MiniScheduler(
        size=108, share=FixedShare(0.5), link=connect(), refresh=REFRESH, adaptive=True
    )
    prompt = context(90)
    turn(s, prompt, [1, 2])
    assert s.tree.tier.link.flush(SAFETY_S)
    request = s.admit([*prompt, 1, 2, 7, 7, 7])
    hold = s.allocator.alloc(s.allocator.available_size() - 20)
    assert s.extend(request, 100)
    assert s.tree.refresh.refresher.counters["refresh_no_room"] == 1
    s.allocator.free(hold)
    s.check()
    s.release(request, checkpoint=True)
    s.check()


def test_room_is_made_in_whole_bundles(connect):
    """There are free slots enough, but no sixteen of them follow each other: what rests goes."""
    s = MiniScheduler(
        size=320, share=FixedShare(0.5), link=connect(), refresh=REFRESH, adaptive=True
    )
    prompt, other = context(90), context(150, seed=1)
    for tokens in (other, prompt):
        turn(s, tokens, [1, 2])
    assert s.tree.tier.link.flush(SAFETY_S)
    request = s.admit([*prompt, 1, 2, 7, 7, 7])
    hold = s.allocator.alloc(s.allocator.available_size())
    s.allocator.free(hold[::2])
    assert s.allocator.whole_bundles() == 0
    assert s.allocator.available_size() > 48
    assert s.extend(request, 100)
    assert s.tree.refresh.refresher.counters["refreshed_turns"] == 1
    assert matched(s, other) == 0
    s.allocator.free(hold[1::2])
    s.check()
    s.release(request, checkpoint=True)
    s.check()

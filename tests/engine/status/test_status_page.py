"""The status page says in words and rows what a scheduler answered, whatever that server is."""

from __future__ import annotations

import json

import pytest
from tiered_tree_harness import REFRESH, two_turns
from tree_harness import MiniScheduler, run_turn
from tree_requests import context

from kvtier.retention.shares import FixedShare
from kvtier_sglang.status.page import Server, render
from kvtier_sglang.status.state import status_of

SERVER = Server("a-model", "2026-11-26 12:00:00 UTC")


def status(s: MiniScheduler) -> dict:
    """Return the status as it comes over SGLang's message."""
    return json.loads(json.dumps(status_of(s.tree)))


def test_the_page_has_a_row_for_each_session_and_each_of_its_turns(connect):
    s = MiniScheduler(share=FixedShare(0.5), link=connect(), refresh=REFRESH)
    two_turns(s)
    run_turn(s, context(30, seed=7), [1])
    found = status(s)
    page = render(SERVER, [found], 50)
    for row in found["sessions"]["rows"]:
        assert f'data-branch="{row["branch"]}"' in page
        for turn in row["turns"]:
            assert f"<td>{turn['begin']:,} to {turn['stop']:,}</td>" in page
    assert "context-anchored" in page
    assert "retention (share 0.5)" in page
    assert "well" in page
    assert page.count("<details") == 2
    assert render(SERVER, [found], 1).count("<details") == 1


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_rule_in_force_is_told_in_words(adaptive):
    s = MiniScheduler(share=FixedShare(0.25), adaptive=adaptive)
    run_turn(s, context(60), [1])
    page = render(SERVER, [status(s)], 50)
    assert ("KV heads compete for the entries" in page) == adaptive
    assert ("are locality heads" in page) != adaptive
    assert "the first 4 and the last 6 tokens" in page


def test_a_server_that_keeps_everything_says_so():
    page = render(SERVER, [status(MiniScheduler())], 50)
    assert "keep the whole context" in page
    assert "None is cached." in page
    assert "exact KV is" in page


def test_a_tier_that_is_away_stands_out(connect):
    s = MiniScheduler(link=connect())
    for _ in range(3):
        s.tree.tier.link.breaker.failed()
    assert '<span class="bad">away</span>' in render(SERVER, [status(s)], 50)


def test_replicas_are_told_one_by_one_and_one_without_kvtier_is_no_error():
    s = MiniScheduler()
    run_turn(s, context(30), [1])
    page = render(SERVER, [status(s), None], 50)
    assert "Replica 0" in page
    assert "Replica 1" in page
    assert "not kvtier's" in page


def test_memories_and_ranks_are_told():
    s = MiniScheduler()
    run_turn(s, context(30), [1])
    memories = {
        "loaded": [{"digest": "0123abcd", "prefix_tokens": 1500}],
        "bytes": 2048,
        "lookups": 7,
    }
    found = {**status(s), "memories": memories, "ranks": 8}
    page = render(SERVER, [found], 50)
    assert "0123abcd" in page
    assert "2.0 KiB on the device, lookups 7" in page
    assert "one of 8 ranks" in page


def test_what_is_not_ours_is_escaped():
    s = MiniScheduler()
    page = render(Server("<script>alert(1)</script>", "now"), [status(s)], 50)
    assert "<script" not in page

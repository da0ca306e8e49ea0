"""The status page's account of a tree is what the tree and its pool say of themselves."""

from __future__ import annotations

import json

import pytest
from tiered_tree_harness import REFRESH, SHARES, turn, two_turns
from tree_harness import MiniScheduler, run_turn
from tree_requests import context
from waiting import SAFETY_S

from kvtier.retention.shares import FixedShare
from kvtier_sglang.status import sessions as sessions_module
from kvtier_sglang.status.sessions import MOST_TURNS, sessions
from kvtier_sglang.status.state import status_of


def rows(s: MiniScheduler, most: int = 100) -> list[dict]:
    return sessions(s.tree, most)["rows"]


def test_bytes_of_sessions_that_share_nothing_add_up_to_what_the_pool_holds():
    s = MiniScheduler(share=FixedShare(0.5))
    for seed in range(3):
        run_turn(s, context(60, seed=seed), [seed, 1])
    found = rows(s)
    assert len(found) == 3
    assert sum(row["bytes"] for row in found) == s.allocator.used_bytes()
    for row in found:
        assert 0 < row["bytes"] < row["full_bytes"] == 62 * s.pool.slot_bytes


@pytest.mark.parametrize("share", SHARES)
def test_a_session_says_why_each_of_its_turns_keeps_what_it_keeps(share):
    s = MiniScheduler(share=share)
    two_turns_of(s)
    (row,) = rows(s)
    assert row["num_turns"] == 2
    assert [(t["begin"], t["stop"]) for t in row["turns"]] == [(62, 105), (0, 62)]
    assert [t["reason"] for t in row["turns"]] == [None if share is None else "share"] * 2
    assert row["turns"][1]["dropped_tokens"] == 50
    assert not row["turns"][1]["is_exact"]
    newest_first = sorted(s.tree.nodes(), key=lambda node: -node.start)
    assert [t["slots"] for t in row["turns"]] == [n.num_slots for n in newest_first]
    assert [t["entries"] for t in row["turns"]] == [n.entries for n in newest_first]
    assert row["slots"] == sum(t["slots"] for t in row["turns"])


def test_sessions_that_share_a_prefix_go_by_their_own_parts():
    s = MiniScheduler()
    shared = context(40)
    run_turn(s, [*shared, 1, 2, 3], [4])
    run_turn(s, [*shared, 5, 6, 7], [8])
    found = rows(s)
    assert len({row["branch"] for row in found}) == len(found) == 2
    assert all(0 < row["shared_tokens"] <= 40 for row in found)


def test_a_session_keeps_its_number_and_says_what_became_of_its_last_prompt():
    s = MiniScheduler(share=FixedShare(0.5))
    run_turn(s, context(60), [1, 2])
    (before,) = rows(s)
    run_turn(s, [*context(60), 1, 2, *context(40, seed=1)], [3])
    (after,) = rows(s)
    assert before["branch"] == after["branch"]
    assert after["context_tokens"] > before["context_tokens"]
    assert after["last_prompt"] == {
        "tokens": 102, "hit": 62, "restored": 0, "computed": 40, "recomputed": {},
    }  # fmt: skip


def test_the_newest_come_first_and_no_more_than_asked_for():
    s = MiniScheduler()
    for seed in range(4):
        run_turn(s, context(30, seed=seed), [1])
    branches = [row["branch"] for row in rows(s)]
    run_turn(s, [*context(30, seed=0), 1, *context(5, seed=9)], [2])
    assert rows(s, 1)[0]["branch"] == branches[-1]
    assert len(rows(s, 2)) == 2
    assert sessions(s.tree, 2)["seen"] == 4


def test_of_a_long_session_only_the_newest_turns_are_told():
    s = MiniScheduler(size=900)
    history: list[int] = []
    for seed in range(MOST_TURNS + 3):
        history += context(20, seed=seed)
        run_turn(s, history, [seed % 50])
        history.append(seed % 50)
    (row,) = rows(s)
    assert row["num_turns"] == MOST_TURNS + 3
    assert len(row["turns"]) == MOST_TURNS
    assert row["turns"][0]["stop"] == row["context_tokens"]


def test_looking_stops_in_time_and_says_so(monkeypatch):
    s = MiniScheduler()
    for seed in range(5):
        run_turn(s, context(20, seed=seed), [1])
    monkeypatch.setattr(sessions_module, "LONGEST_LOOK_S", -1.0)
    found = sessions(s.tree, 100)
    assert not found["complete"]
    assert found["seen"] == len(found["rows"]) == 1


def test_a_request_that_runs_is_told_from_a_session_that_waits():
    s = MiniScheduler()
    request = s.admit(context(30))
    s.extend(request, 30)
    s.checkpoint(request)
    assert [row["is_running"] for row in rows(s)] == [True]
    s.release(request, checkpoint=True)
    assert [row["is_running"] for row in rows(s)] == [False]


@pytest.mark.parametrize("share", SHARES)
def test_what_the_tier_got_and_gave_is_told(connect, share):
    a = MiniScheduler(share=share, link=connect())
    tokens = two_turns(a)
    (row,) = rows(a)
    layout = a.tree.tier.codec.layout(1).num_bytes
    spilled = a.tree.tier.spiller.counters["spill_bytes"] // layout
    # The second turn's first span begins in the first turn, whose last tokens are sent again.
    assert row["tier_tokens"] <= row["context_tokens"] <= spilled <= row["tier_tokens"] + 6
    assert row["restored_tokens"] == 0
    b = MiniScheduler(share=share, link=connect())
    turn(b, [*tokens, 9, 9], [3])
    (row,) = rows(b)
    assert row["restored_tokens"] == len(tokens) == b.tree.tier.counters["restored_tokens"]
    reasons = {t["reason"] for t in row["turns"] if t["restored_tokens"]}
    assert reasons == ({None} if share is None else {"as-recorded"})


def test_nothing_of_a_status_depends_on_the_tokens(connect):
    """Two servers that did the same with other tokens, extra keys and salts say the same."""
    told = []
    for seed in (1, 2):
        s = MiniScheduler(share=FixedShare(0.5), link=connect(), refresh=REFRESH)
        tokens = [(token * (7 if seed == 1 else 11)) % 50 for token in range(60)]
        run_turn(s, tokens, [seed, 1])
        assert s.tree.tier.link.flush(SAFETY_S)
        status = status_of(s.tree)
        first = status["sessions"]["rows"][0]["branch"]
        text = json.dumps(without_times(status)).replace(f'"branch": {first}', '"branch": 0')
        told.append(text)
    assert told[0] == told[1]


def without_times(status: dict) -> dict:
    del status["took_s"]
    del status["figures"]["kvtier_refresh_seconds"]
    for row in status["sessions"]["rows"]:
        del row["idle_s"]
    return status


def two_turns_of(s: MiniScheduler) -> None:
    run_turn(s, context(60), [1, 2])
    run_turn(s, [*context(60), 1, 2, *context(40, seed=1)], [3, 4, 5])

"""Traces: what is read, what is refused, and what goes on with what."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traffic.trace_models import lru_hit_rate, make_trace, write_trace

from kvtier.errors import TracesFileError, UsageError
from kvtier.traffic.continuations import find_continuations, sessions_of
from kvtier.traffic.formats import read_trace
from kvtier.traffic.lru import hit_rates
from kvtier.traffic.trace import Trace, TraceRequest

GOOD = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
SESSION = [
    {"timestamp": 1000, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]},
    {"timestamp": 1500, "input_length": 512, "output_length": 3, "hash_ids": [7]},
    {"delay": 4000, "input_length": 700, "output_length": 9, "hash_ids": [1, 3]},
    {"timestamp": 9000, "delay": 0, "input_length": 700, "output_length": 9, "hash_ids": [1, 4]},
]


def test_what_comes_after_answers_is_read_and_written_as_it_was(tmp_path: Path):
    lines = [line | {"session_id": "a" if at != 1 else "b"} for at, line in enumerate(SESSION)]
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    trace = read_trace(file)
    assert [one.arrival_s for one in trace.requests] == [1.0, 1.5, 5.0, 9.0]
    assert [one.delay_s for one in trace.requests] == [None, None, 4.0, 0.0]
    assert trace.before() == [None, None, 0, 2]
    assert sessions_of(trace) == [0, 1, 0, 0]
    assert [one.delay_s for one in trace.scaled(16, 2.0).requests] == [None, None, 2.0, 0.0]
    for written in (trace, make_trace(1)):
        assert read_trace(write_trace(tmp_path / "again.jsonl", written)) == written


def recorded(hashes: int, **others: Any) -> dict[str, Any]:
    """A request of so many whole blocks of 64 tokens and ten tokens more."""
    ids = [*range(hashes)]
    return {"t": 0.0, "in": 64 * hashes + 10, "out": 5, "hash_ids": ids, **others}


AGENT: dict[str, Any] = {
    "id": "one", "block_size": 64, "hash_id_scope": "local",
    "requests": [
        recorded(8, api_time=2.0),
        recorded(17, t=10.0, think_time=7.5, out=0),
        {"type": "subagent", "agent_id": "x", "t": 11.0, "requests": [recorded(9)]},
        recorded(24, t=20.0),
    ],
}  # fmt: skip
AGENTS = [AGENT, AGENT | {"id": "two"}]


def test_agents_sessions_are_read_as_they_were_recorded(tmp_path: Path):
    file = tmp_path / "sessions.jsonl"
    file.write_text("\n".join(map(json.dumps, AGENTS)))
    requests = read_trace(file).requests
    mine = [one for one in requests if one.session == "one"]
    assert [one.arrival_s for one in mine] == [0.0, 10.0, 20.0]
    # The delays are as it says, or as its times do.
    assert [one.delay_s for one in mine] == [None, 7.5, 10.0]
    assert [one.output_tokens for one in mine] == [5, 1, 5]
    # Eight blocks of 64 are one of 512; what is partly filled is nobody else's.
    first, second, third = (one.block_ids for one in mine)
    assert [len(ids) for ids in (first, second, third)] == [2, 3, 4]
    assert first[0] == second[0] == third[0]
    assert second[1] == third[1]
    assert len({*first, *second, *third}) == 2 + 2 + 2
    (nested,) = [one for one in requests if one.session == "one/2"]
    assert nested.arrival_s == 11.0
    assert nested.block_ids[0] != first[0]
    others = {block for one in requests if one.session == "two" for block in one.block_ids}
    assert not others & {*first, *second, *third}
    shared = json.dumps(AGENT | {"hash_id_scope": "global"}) + "\n"
    file.write_text(shared + shared.replace('"one"', '"two"'))
    assert len({one.block_ids[0] for one in read_trace(file).requests}) == 1


def test_sessions_begin_when_they_are_drawn_to(tmp_path: Path):
    file = tmp_path / "sessions.jsonl"
    file.write_text("\n".join(json.dumps(AGENT | {"id": str(name)}) for name in range(20)))

    def begins(seed: int) -> list[float]:
        requests = read_trace(file, spread_s=600, seed=seed).requests
        return [one.arrival_s for one in requests if one.delay_s is None and "/" not in one.session]

    assert begins(1) == begins(1) != begins(2)
    assert max(begins(1)) - min(begins(1)) > 300


WAITS = [SESSION[0] | {"session_id": "a"}, SESSION[2] | {"session_id": "a"}]


@pytest.mark.parametrize(
    ("lines", "change", "named", "says"),
    [
        ([GOOD, GOOD], {"timestamp": None}, "timestamp", "a number"),
        ([GOOD, GOOD], {"timestamp": -1}, "timestamp", "at least 0"),
        ([GOOD, GOOD], {"input_length": 0}, "input_length", "at least 1"),
        ([GOOD, GOOD], {"output_length": True}, "output_length", "a number"),
        ([GOOD, GOOD], {"hash_ids": "ab"}, "hash_ids", "whole numbers"),
        ([GOOD, GOOD], {"hash_ids": [1]}, "hash_ids", "2 ids for 600 tokens"),
        ([GOOD, GOOD], {"hash_ids": [3, 2]}, "hash_ids", "block 2 behind the same block"),
        (WAITS, {"session_id": 5}, "session_id", "text"),
        (WAITS, {"session_id": "b"}, "delay", "an earlier request with the same session_id"),
        (WAITS, {"session_id": None}, "delay", "an earlier request with the same session_id"),
        (WAITS, {"delay": -1}, "delay", "at least 0"),
        (WAITS, {"timestamp": 999}, "timestamp", "at least 1000"),
        (AGENTS, {"id": None}, "id", "text"),
        (AGENTS, {"id": "one"}, "id", "that no session before has"),
        (AGENTS, {"block_size": 100}, "block_size", "a whole part of 512"),
        (AGENTS, {"requests": [5]}, "requests", "a list"),
        (AGENTS, {"requests": [recorded(1, hash_ids=[[1]])]}, "requests[0]: hash_ids", "numbers"),
        (AGENTS, {"requests": [recorded(8, hash_ids=[1])]}, "requests[0]: hash_ids", "8 hashes"),
        (AGENTS, {"requests": [recorded(8, t=5), recorded(8, t=4)]}, "requests[1]: t", "at least"),
        (
            AGENTS,
            {"requests": [recorded(8), recorded(8, think_time=-1)]},
            "requests[1]: think_time",
            "at least 0",
        ),
        (AGENTS, {"requests": [{"type": "subagent", "t": 0}]}, "requests[0]: requests", "a list"),
    ],
)
def test_a_malformed_line_is_refused_by_line_and_field(
    tmp_path: Path, lines: list[Any], change: dict[str, Any], named: str, says: str
):
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(lines[0]) + "\n\n" + json.dumps(lines[1] | change) + "\n")
    with pytest.raises(TracesFileError, match=says) as caught:
        read_trace(file)
    assert caught.value.argument == f"{file}, line 3: {named}"


def test_what_is_no_trace_at_all_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"--trace: expected a readable file"):
        read_trace(tmp_path / "gone")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UsageError, match="at least one request"):
        read_trace(tmp_path / "empty")


@given(st.integers(0, 99), st.integers(1, 600), st.sampled_from([0.5, 1.0, 3.0]))
def test_scaling_keeps_blocks_and_order_and_every_length_is_at_least_a_token(seed, block, speed):
    trace = make_trace(seed)
    scaled = trace.scaled(block, speed)
    for before, after in zip(trace.requests, scaled.requests, strict=True):
        assert after.block_ids == before.block_ids
        assert -(-after.input_tokens // block) == len(after.block_ids)
        assert after.output_tokens >= 1
        assert after.arrival_s == before.arrival_s / speed


def test_the_next_turn_of_a_conversation_is_found():
    turns = Trace(
        (
            TraceRequest(0.0, 1300, 50, (0, 7, 8)),
            TraceRequest(1.0, 1300, 50, (0, 9, 10)),
            TraceRequest(2.0, 1700, 50, (0, 7, 11, 12)),
            TraceRequest(3.0, 1740, 50, (0, 7, 11, 13)),
        )
    )
    found = find_continuations(turns)
    # The fourth shares three whole blocks with the third, but is too short to hold its answer, so
    # it goes on with nothing that is known: the first was continued already.
    assert found.next_request == {0: 2}
    assert found.same_block == {8: 11}
    assert found.blocks(turns.requests[0]) == [0, 7, 11]


@given(st.integers(0, 500))
def test_every_turn_but_a_conversations_last_is_continued(seed):
    trace = make_trace(seed, conversations=6, turns=4)
    found = find_continuations(trace)
    for earlier, later in found.next_request.items():
        one, other = trace.requests[earlier], trace.requests[later]
        assert other.arrival_s >= one.arrival_s
        assert other.input_tokens >= one.input_tokens + one.output_tokens
        whole = trace.whole_blocks(one)
        assert other.block_ids[:whole] == one.block_ids[:whole]
    assert len(set(found.next_request.values())) == len(found.next_request)
    assert not set(found.same_block) & set(found.same_block.values())


@given(st.integers(0, 10_000), st.lists(st.integers(1, 200), min_size=1, max_size=6))
def test_hit_rates_of_all_sizes_are_those_of_a_cache_of_each_by_the_book(seed, sizes):
    trace = make_trace(seed)
    sizes = [0, *sizes, math.inf]
    wanted = [lru_hit_rate(trace, size) for size in sizes]
    found = hit_rates(trace, [size * trace.block_tokens for size in sizes])
    assert found == pytest.approx(wanted, abs=1e-12)

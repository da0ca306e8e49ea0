"""Traces: what is read, what is refused, and what goes on with what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traffic.trace_models import make_trace, write_trace

from kvtier.errors import TracesFileError, UsageError
from kvtier.traffic.continuations import find_continuations
from kvtier.traffic.trace import Trace, TraceRequest, read_trace

GOOD = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}


def test_a_trace_that_is_written_is_read_as_it_was(tmp_path: Path):
    trace = make_trace(1)
    assert read_trace(write_trace(tmp_path / "trace.jsonl", trace)) == trace


@pytest.mark.parametrize(
    ("change", "named", "says"),
    [
        ({"timestamp": None}, "timestamp", "a number"),
        ({"timestamp": -1}, "timestamp", "at least 0"),
        ({"input_length": 0}, "input_length", "at least 1"),
        ({"output_length": True}, "output_length", "a number"),
        ({"hash_ids": "ab"}, "hash_ids", "whole numbers"),
        ({"hash_ids": [1]}, "hash_ids", "2 ids for 600 tokens"),
        ({"hash_ids": [3, 2]}, "hash_ids", "block 2 behind the same block"),
    ],
)
def test_a_malformed_line_is_refused_by_line_and_field(
    tmp_path: Path, change: dict[str, object], named: str, says: str
):
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(GOOD) + "\n\n" + json.dumps(GOOD | change) + "\n")
    with pytest.raises(TracesFileError) as caught:
        read_trace(file)
    assert caught.value.argument == f"{file}, line 3: {named}"
    assert says in str(caught.value)


def test_what_is_no_trace_at_all_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"--trace: expected a readable file"):
        read_trace(tmp_path / "gone")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UsageError, match="at least one request"):
        read_trace(tmp_path / "empty")
    (tmp_path / "words").write_text("words\n")
    with pytest.raises(TracesFileError, match="line 1: expected a JSON object"):
        read_trace(tmp_path / "words")


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

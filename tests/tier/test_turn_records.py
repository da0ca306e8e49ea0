"""Records of turns, as they are stored and read again."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import TierProtocolError
from kvtier.tier.blobs.turns import NodeRecord, TurnRecord, decode_record, places


def node(stop: int, *, exact: bool = False, dropped: tuple[int, int] = (0, 0)) -> NodeRecord:
    kept = min(1, dropped[1] - dropped[0])
    return NodeRecord(
        stop=stop, prompt_stop=stop, compressed=True, dropped=dropped, kept=kept, exact=exact
    )


@given(start=st.integers(0, 1000), lengths=st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_a_record_is_read_as_it_was_written(start, lengths):
    stops = [start + sum(lengths[: count + 1]) for count in range(len(lengths))]
    record = TurnRecord(nodes=tuple(map(node, stops)), tail="ab", start=start)
    read = decode_record(record.encode())
    assert read == record
    assert [place.start for place in places(read)] == [start, *stops[:-1]]
    assert (read.stop, read.exact_stop) == (stops[-1], 0)


def test_a_record_of_no_memory_is_what_servers_before_memories_wrote_and_read():
    record = TurnRecord(nodes=(node(9, exact=True),), tail="ab")
    written = json.loads(record.encode())
    assert sorted(written) == ["nodes", "tail"]
    assert decode_record(json.dumps(written).encode()).start == 0


@pytest.mark.parametrize(
    ("nodes", "what"),
    [
        ((node(20),), "do not follow"),
        ((node(40, exact=True),), "exact KV behind"),
        ((node(40, dropped=(2, 21)),), "outside of its node"),
    ],
)
def test_behind_a_memory_nodes_begin_where_its_prefix_ends_and_are_not_exact(nodes, what):
    written = {"nodes": [one.model_dump() for one in nodes], "tail": "ab", "start": 20}
    with pytest.raises(TierProtocolError, match=what):
        decode_record(json.dumps(written).encode())
    longer = {**written, "nodes": [node(40, dropped=(2, 20)).model_dump()]}
    assert decode_record(json.dumps(longer).encode()).start == 20


WRITTEN = TurnRecord(nodes=(node(10), node(22)), tail="").encode()


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"{}", b'{"nodes": [], "tail": ""}', b"\xff\xfe",
        WRITTEN.replace(b'"stop":10', b'"stop":"10"'),
        WRITTEN.replace(b'"dropped":[0,0]', b'"dropped":[4,40]'),
        WRITTEN.replace(b'"kept":0', b'"kept":3'),
        WRITTEN.replace(b'"tail"', b'"nail"'),
    ],
)  # fmt: skip
def test_a_record_that_makes_no_sense_is_a_protocol_error(payload):
    with pytest.raises(TierProtocolError):
        decode_record(payload)

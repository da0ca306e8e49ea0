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
    # Servers before memories know no start.
    assert ("start" in json.loads(record.encode())) == (start > 0)


WRITTEN = TurnRecord(nodes=(node(10), node(22)), tail="").encode()


def behind_memory(only: NodeRecord) -> bytes:
    """A record that begins at 20, behind the prefix that a memory stands for."""
    written = {"nodes": [only.model_dump()], "tail": "ab", "start": 20}
    return json.dumps(written).encode()


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"{}", b'{"nodes": [], "tail": ""}', b"\xff\xfe",
        WRITTEN.replace(b'"stop":10', b'"stop":"10"'),
        WRITTEN.replace(b'"dropped":[0,0]', b'"dropped":[4,40]'),
        WRITTEN.replace(b'"kept":0', b'"kept":3'),
        WRITTEN.replace(b'"tail"', b'"nail"'),
        # Nodes begin where the prefix ends, and are not exact.
        behind_memory(node(20)), behind_memory(node(40, exact=True)),
        behind_memory(node(40, dropped=(2, 21))),
    ],
)  # fmt: skip
def test_a_record_that_makes_no_sense_is_a_protocol_error(payload):
    with pytest.raises(TierProtocolError):
        decode_record(payload)
    assert decode_record(behind_memory(node(40, dropped=(2, 20)))).start == 20

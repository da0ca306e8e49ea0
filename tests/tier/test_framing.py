"""Chunks that are framed by hand are protobuf, byte by byte, and what is not framed so still is."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tier.wire import chunk_of, frame_chunk, parse_get_response, parse_put_request, serialize
from kvtier.v1 import tier_pb2 as pb

PARSERS = {pb.PutRequest: parse_put_request, pb.GetResponse: parse_get_response}
# The lengths lie around every length whose varint is one byte longer.
LENGTHS = st.sampled_from([0, 1, 127, 128, 129, 16383, 16384, 1 << 20, (1 << 21) - 1, 1 << 21])


@given(payload=st.binary(max_size=300) | LENGTHS.map(bytes))
def test_a_framed_chunk_is_what_protobuf_makes_of_it_and_is_not_copied(payload: bytes) -> None:
    framed = frame_chunk(memoryview(payload))
    for kind, parse in PARSERS.items():
        assert framed == kind(chunk=payload).SerializeToString()
        assert bytes(parse(framed)) == payload
    assert chunk_of(framed) == payload
    assert chunk_of(framed).obj is framed
    assert serialize(framed) is framed
    # With more around it it is one still.
    more = pb.PutRequest(chunk=payload, replace=True).SerializeToString()
    assert chunk_of(more) is None
    assert parse_put_request(more) == payload
    assert parse_get_response(frame_chunk(b"first") + framed) == payload


MESSAGES = st.binary(max_size=40)


# A varint may be longer than it has to be.
@given(message=MESSAGES | MESSAGES.map(lambda tail: b"\x12" + tail) | st.just(b"\x12\x81\x00x"))
def test_bytes_mean_what_protobuf_says_they_mean(message: bytes) -> None:
    for kind, parse in PARSERS.items():
        try:
            expected = kind.FromString(message)
        except DecodeError:
            with pytest.raises(DecodeError):
                parse(message)
            continue
        is_chunk = expected.WhichOneof("part") == "chunk"
        assert parse(message) == (expected.chunk if is_chunk else expected)

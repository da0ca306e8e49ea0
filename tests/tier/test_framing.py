"""Chunks that are framed by hand are protobuf, byte by byte, and what is not framed so still is."""

from __future__ import annotations

import pytest

pytest.importorskip("grpc")

from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tier.wire import chunk_of, frame_chunk, parse_get_response, parse_put_request, serialize
from kvtier.v1 import tier_pb2 as pb

KINDS = (pb.PutRequest, pb.GetResponse)
PARSERS = {pb.PutRequest: parse_put_request, pb.GetResponse: parse_get_response}
# The lengths lie around every length whose varint is one byte longer.
LENGTHS = st.sampled_from([0, 1, 127, 128, 129, 16383, 16384, 1 << 20, (1 << 21) - 1, 1 << 21])
payloads = st.binary(max_size=300) | LENGTHS.map(bytes)


@given(payload=payloads)
def test_a_framed_chunk_is_what_protobuf_makes_of_it(payload: bytes) -> None:
    framed = frame_chunk(memoryview(payload))
    for kind in KINDS:
        assert framed == kind(chunk=payload).SerializeToString()
        assert kind.FromString(framed).chunk == payload
        assert bytes(PARSERS[kind](framed)) == payload
    assert chunk_of(framed) == payload


def test_a_chunk_is_not_copied_out_of_its_message() -> None:
    framed = frame_chunk(b"payload")
    assert chunk_of(framed).obj is framed
    assert serialize(framed) is framed


@given(payload=payloads)
def test_a_chunk_with_more_around_it_is_a_chunk(payload: bytes) -> None:
    more = pb.PutRequest(chunk=payload, replace=True).SerializeToString()
    assert chunk_of(more) is None
    assert parse_put_request(more) == payload
    twice = frame_chunk(b"first") + frame_chunk(payload)
    assert parse_get_response(twice) == payload
    # A varint may be longer than it has to be.
    assert chunk_of(b"\x12\x81\x00x") == b"x"


@given(message=st.binary(max_size=40) | st.binary(max_size=40).map(lambda tail: b"\x12" + tail))
def test_bytes_mean_what_protobuf_says_they_mean(message: bytes) -> None:
    for kind, parse in PARSERS.items():
        try:
            expected = kind.FromString(message)
        except DecodeError:
            with pytest.raises(DecodeError):
                parse(message)
            continue
        if expected.WhichOneof("part") == "chunk":
            assert parse(message) == expected.chunk
        else:
            assert parse(message) == expected

"""Checksums: whatever is not exactly what was stored does not verify."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import TierProtocolError, UsageError
from kvtier.tier.blobs.payload import (
    CHECKSUM_BYTES,
    DTYPE_BYTES,
    SpanLayout,
    checksum,
    decode_span_layout,
    record_layout,
    verifies,
)

KEY, OTHER = bytes(range(32)), bytes(32)
SPAN = SpanLayout("float16", num_layers=2, num_tokens=3, num_kv_heads=2, head_dim=4)
LAYOUT = SPAN.encode()
PAYLOADS = st.binary(min_size=SPAN.num_bytes, max_size=SPAN.num_bytes)


@given(PAYLOADS, st.lists(st.integers(0, SPAN.num_bytes), max_size=4))
def test_what_was_stored_verifies_in_one_piece_and_in_many(payload, cuts):
    found = checksum(KEY, "ada", LAYOUT, payload)
    assert len(found) == CHECKSUM_BYTES
    bounds = [0, *sorted(cuts), len(payload)]
    view = memoryview(payload)
    pieces = [view[a:b] for a, b in itertools.pairwise(bounds)]
    assert verifies(found, KEY, "ada", LAYOUT, pieces)
    assert verifies(found, KEY, "ada", LAYOUT, bytearray(payload))


@given(PAYLOADS, st.integers(0, 8 * SPAN.num_bytes - 1))
def test_one_flipped_bit_does_not(payload, bit):
    found = checksum(KEY, "ada", LAYOUT, payload)
    flipped = bytearray(payload)
    flipped[bit // 8] ^= 1 << bit % 8
    assert not verifies(found, KEY, "ada", LAYOUT, flipped)


@given(PAYLOADS)
def test_the_right_bytes_under_another_name_do_not(payload):
    found = checksum(KEY, "ada", LAYOUT, payload)
    swapped = replace(SPAN, num_tokens=SPAN.num_layers, num_layers=SPAN.num_tokens).encode()
    assert not verifies(found, OTHER, "ada", LAYOUT, payload)
    assert not verifies(found, KEY, "bob", LAYOUT, payload)
    assert not verifies(found, KEY, "ada", swapped, payload)
    assert not verifies(found, KEY, "ada", replace(SPAN, dtype="bfloat16").encode(), payload)
    assert not verifies(found[:-1] + bytes([found[-1] ^ 1]), KEY, "ada", LAYOUT, payload)


@given(st.integers(0, SPAN.num_bytes - 1))
def test_a_truncated_blob_does_not_and_raises_nothing(length):
    found = checksum(KEY, "ada", LAYOUT, bytes(SPAN.num_bytes))
    assert not verifies(found, KEY, "ada", LAYOUT, bytes(length))
    assert not verifies(b"", KEY, "ada", LAYOUT, bytes(SPAN.num_bytes))


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_sizes_are_those_of_the_tensors(dtype):
    torch = pytest.importorskip("torch")
    span = replace(SPAN, dtype=dtype, score_bytes=7)
    tensor = torch.empty(span.shape, dtype=getattr(torch, dtype))
    assert tensor.numel() * tensor.element_size() == span.kv_bytes == span.num_bytes - 7


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"head_dim": -1}, "head_dim"),
        ({"score_bytes": -1}, "score_bytes"),
    ],
)
def test_a_meaning_that_cannot_be_is_refused_by_name(change, name):
    with pytest.raises(UsageError, match=name):
        replace(SPAN, **change)


def test_a_layout_says_the_same_after_the_wire():
    span = replace(SPAN, score_bytes=12)
    assert decode_span_layout(span.encode()) == span


@pytest.mark.parametrize(
    "layout", [b"", b"\xff\xff", record_layout("turns"), SPAN.encode()[:-1], b"\x0a\x00"]
)
def test_a_layout_that_makes_no_sense_is_a_protocol_error(layout):
    with pytest.raises(TierProtocolError):
        decode_span_layout(layout)

"""Checksums: whatever is not exactly what was stored does not verify."""

from __future__ import annotations

import itertools
from dataclasses import asdict, fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import UsageError
from kvtier.tier.blobs.payload import (
    CHECKSUM_BYTES,
    DTYPE_BYTES,
    SpanLayout,
    checksum,
    verifies,
)
from kvtier.v1 import tier_pb2

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
def test_nothing_else_does(payload, bit):
    found = checksum(KEY, "ada", LAYOUT, payload)
    flipped = bytearray(payload)
    flipped[bit // 8] ^= 1 << bit % 8
    swapped = replace(SPAN, num_tokens=SPAN.num_layers, num_layers=SPAN.num_tokens).encode()
    for other in (
        (found, KEY, "ada", LAYOUT, flipped),
        (found, KEY, "ada", LAYOUT, payload[: bit // 8]),
        (found, OTHER, "ada", LAYOUT, payload),
        (found, KEY, "bob", LAYOUT, payload),
        (found, KEY, "ada", swapped, payload),
        (found, KEY, "ada", replace(SPAN, dtype="bfloat16").encode(), payload),
        (found[:-1] + bytes([found[-1] ^ 1]), KEY, "ada", LAYOUT, payload),
        (b"", KEY, "ada", LAYOUT, payload),
    ):
        assert not verifies(*other)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_sizes_are_those_of_the_tensors_and_a_layout_says_all_of_a_span(dtype):
    span = replace(SPAN, dtype=dtype, score_bytes=7)
    tensor = torch.empty(span.shape, dtype=getattr(torch, dtype))
    assert tensor.numel() * tensor.element_size() == span.kv_bytes == span.num_bytes - 7
    kv = tier_pb2.Layout.FromString(span.encode()).kv
    assert {field.name: getattr(kv, field.name) for field in fields(span)} == asdict(span)


@pytest.mark.parametrize(
    ("name", "value"), [("dtype", "int8"), ("num_tokens", 0), ("head_dim", -1), ("score_bytes", -1)]
)
def test_a_meaning_that_cannot_be_is_refused_by_name(name, value):
    with pytest.raises(UsageError, match=name):
        replace(SPAN, **{name: value})

"""Checksums: whatever is not exactly what was stored does not verify."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import UsageError
from kvtier.tier.blob import CHECKSUM_BYTES, DTYPE_BYTES, BlobMeta, checksum, verifies

KEY, OTHER = bytes(range(32)), bytes(32)
META = BlobMeta("float16", num_layers=2, num_tokens=3, num_kv_heads=2, head_dim=4)
PAYLOADS = st.binary(min_size=META.num_bytes, max_size=META.num_bytes)


@given(PAYLOADS, st.lists(st.integers(0, META.num_bytes), max_size=4))
def test_what_was_stored_verifies_in_one_piece_and_in_many(payload, cuts):
    found = checksum(KEY, "ada", META, payload)
    assert len(found) == CHECKSUM_BYTES
    bounds = [0, *sorted(cuts), len(payload)]
    view = memoryview(payload)
    pieces = [view[a:b] for a, b in itertools.pairwise(bounds)]
    assert verifies(found, KEY, "ada", META, pieces)
    assert verifies(found, KEY, "ada", META, bytearray(payload))


@given(PAYLOADS, st.integers(0, 8 * META.num_bytes - 1))
def test_one_flipped_bit_does_not(payload, bit):
    found = checksum(KEY, "ada", META, payload)
    flipped = bytearray(payload)
    flipped[bit // 8] ^= 1 << bit % 8
    assert not verifies(found, KEY, "ada", META, flipped)


@given(PAYLOADS)
def test_the_right_bytes_under_another_name_do_not(payload):
    found = checksum(KEY, "ada", META, payload)
    swapped = replace(META, num_tokens=META.num_layers, num_layers=META.num_tokens)
    assert not verifies(found, OTHER, "ada", META, payload)
    assert not verifies(found, KEY, "bob", META, payload)
    assert not verifies(found, KEY, "ada", swapped, payload)
    assert not verifies(found, KEY, "ada", replace(META, dtype="bfloat16"), payload)
    assert not verifies(found[:-1] + bytes([found[-1] ^ 1]), KEY, "ada", META, payload)


@given(st.integers(0, META.num_bytes - 1))
def test_a_truncated_blob_does_not_and_raises_nothing(length):
    found = checksum(KEY, "ada", META, bytes(META.num_bytes))
    assert not verifies(found, KEY, "ada", META, bytes(length))
    assert not verifies(b"", KEY, "ada", META, bytes(META.num_bytes))


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_sizes_are_those_of_the_tensors(dtype):
    torch = pytest.importorskip("torch")
    meta = replace(META, dtype=dtype)
    tensor = torch.empty(meta.shape, dtype=getattr(torch, dtype))
    assert tensor.numel() * tensor.element_size() == meta.num_bytes


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"head_dim": -1}, "head_dim"),
    ],
)
def test_a_meaning_that_cannot_be_is_refused_by_name(change, name):
    with pytest.raises(UsageError, match=name):
        replace(META, **change)


def test_what_is_put_under_a_wrong_key_or_length_is_refused_by_name():
    with pytest.raises(UsageError, match="key"):
        checksum(b"short", "ada", META, bytes(META.num_bytes))
    with pytest.raises(UsageError, match="payload"):
        checksum(KEY, "ada", META, b"")

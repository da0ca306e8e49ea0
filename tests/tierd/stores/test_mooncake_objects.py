"""The parts of the distributed store that need no Mooncake: its options, and what an object is."""

from __future__ import annotations

import importlib.util

import pytest
from store_blobs import SIZE, info_of, payload_of

from kvtier.errors import UsageError
from kvtier_tierd.stores.mooncake.options import MooncakeOptions
from kvtier_tierd.stores.mooncake.store import MooncakeStore, object_bytes, parse_trailer, trailer


def test_a_package_that_is_not_installed_is_said_with_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install mooncake-transfer-engine-non-cuda") as error:
        MooncakeStore(MooncakeOptions())
    assert error.value.argument == "--store"


@pytest.mark.parametrize(("given", "flag"), [
    ({"master": "nowhere"}, "--mooncake-master"),
    ({"metadata": "etcd"}, "--mooncake-metadata"),
    ({"segment_bytes": 1}, "--mooncake-segment"),
    ({"segment_bytes": 0}, "--mooncake-capacity"),
    ({"buffer_bytes": 0}, "--mooncake-buffer"),
    ({"replicas": 0}, "--mooncake-replicas"),
    ({"timeout_s": 0.0}, "timeout_s"),
])  # fmt: skip
def test_options_that_cannot_be_are_refused_by_flag(given, flag):
    with pytest.raises(UsageError) as error:
        MooncakeOptions(**given)
    assert error.value.argument == flag


def test_a_trailer_says_what_it_was_made_of():
    payload = payload_of(1, SIZE)
    info = info_of(payload, b"layout")
    whole = payload + trailer(info)
    assert len(whole) == object_bytes(info)
    assert parse_trailer(memoryview(whole)) == info
    for cut in (whole[:-1], whole[1:], b"", b"x" * 36):
        assert parse_trailer(memoryview(cut)) is None

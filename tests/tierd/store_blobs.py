"""Numbered blobs for the tests of stores, and how one is put, read and looked for."""

from __future__ import annotations

import random
from collections.abc import Mapping

import xxhash

from kvtier_tierd.stores.base import BlobInfo, BlobName, BlobStore, Draft, Handle
from kvtier_tierd.stores.memory import MemoryStore

SIZE = 10_000
LAYOUT = b"a layout"


def blob_name(number: int, namespace: str = "a") -> BlobName:
    return BlobName(namespace, number.to_bytes(32, "big"))


def payload_of(seed: object, num_bytes: int = SIZE) -> bytes:
    return random.Random(repr(seed)).randbytes(num_bytes)


def info_of(payload: bytes, layout: bytes = LAYOUT) -> BlobInfo:
    return BlobInfo(len(payload), layout, xxhash.xxh3_128_digest(payload))


async def reserve(
    store: BlobStore, name: BlobName, payload: bytes, layout: bytes = LAYOUT
) -> Draft:
    """A filled draft."""
    draft = await store.reserve(name, info_of(payload, layout))
    draft.buffer[:] = payload
    return draft


async def put(store: BlobStore, name: BlobName, payload: bytes, layout: bytes = LAYOUT) -> None:
    await store.commit(await reserve(store, name, payload, layout))


def content(handle: Handle) -> bytes:
    return b"".join(bytes(piece) for piece in handle.pieces)


async def get(store: BlobStore, name: BlobName, layout: bytes = LAYOUT) -> bytes | None:
    """The payload, after checking it against what came with it."""
    handle = await store.open(name)
    if handle is None:
        return None
    payload = content(handle)
    assert handle.info == info_of(payload, layout)
    assert all(piece.readonly for piece in handle.pieces)
    handle.close()
    return payload


async def held(store: BlobStore, *numbers: int) -> list[int]:
    """Return which of the numbered blobs there are."""
    found = await store.exists([blob_name(number) for number in numbers])
    return [number for number, there in zip(numbers, found, strict=True) if there]


def memory_store(
    capacity_bytes: int,
    quotas: Mapping[str, int] | None = None,
    watermarks: tuple[float, float] = (1.0, 1.0),
) -> MemoryStore:
    """A store that evicts nothing ahead of time: tests that count blobs would miss it."""
    store = MemoryStore(capacity_bytes, quotas)
    store.watermarks = watermarks
    return store

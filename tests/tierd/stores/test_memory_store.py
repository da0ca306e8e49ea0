"""The memory store, alone and in front of a disk, does what any store must do."""

from __future__ import annotations

import pytest
from store_blobs import SIZE, blob_name, get, held, payload_of, put, reserve
from store_contract import StoreContract

from kvtier.errors import TierExhaustedError
from kvtier_tierd.stores.arena import pages
from kvtier_tierd.stores.layered import LayeredStore
from kvtier_tierd.stores.memory import MemoryStore

# Tests that count blobs would miss what is evicted ahead of time.
NO_WATERMARKS = (1.0, 1.0)
COST = pages(SIZE)


class TestMemoryStoreContract(StoreContract):
    @staticmethod
    def make_store(directory, capacity_bytes, quotas):
        return MemoryStore(capacity_bytes, quotas, watermarks=NO_WATERMARKS)


class TestLayeredStoreContractWhileNothingGetsToDisk(StoreContract):
    @staticmethod
    def make_store(directory, capacity_bytes, quotas):
        memory = MemoryStore(capacity_bytes, quotas, watermarks=NO_WATERMARKS)
        return LayeredStore(memory, MemoryStore(capacity_bytes, quotas), behind_share=0.0)


async def test_beyond_the_high_watermark_the_oldest_go_until_the_low_one():
    store = MemoryStore(20 * COST, watermarks=(0.5, 0.9))
    await put(store, blob_name(0), payload_of(0))
    handle = await store.open(blob_name(0))
    for number in range(1, 18):
        await put(store, blob_name(number), payload_of(number))
    assert await held(store, *range(18)) == list(range(18))
    await put(store, blob_name(18), payload_of(18))
    assert await held(store, *range(19)) == [0, *range(10, 19)]
    handle.close()
    assert store.check_integrity() == []


async def test_making_room_in_one_piece_evicts_no_more_than_lies_there():
    """Even where the least recently used blobs are scattered all over."""
    store = MemoryStore(200 * COST, watermarks=NO_WATERMARKS)
    for number in range(200):
        await put(store, blob_name(number), payload_of(number))
    for number in sorted(range(200), key=lambda number: (number * 77) % 200):
        (await store.open(blob_name(number))).close()
    await put(store, blob_name(999), payload_of(999, 20 * COST))
    assert await get(store, blob_name(999)) == payload_of(999, 20 * COST)
    assert store.stats().blobs - 1 >= 200 - 2 * 20
    assert store.check_integrity() == []


async def test_where_pinned_blobs_leave_no_room_in_one_piece_it_is_exhausted():
    store = MemoryStore(3 * COST, watermarks=NO_WATERMARKS)
    for number in range(3):
        await put(store, blob_name(number), payload_of(number))
    handle = await store.open(blob_name(1))
    with pytest.raises(TierExhaustedError, match="in one piece"):
        await reserve(store, blob_name(9), payload_of(9, 2 * COST))
    handle.close()
    assert store.check_integrity() == []
    await put(store, blob_name(9), payload_of(9, 2 * COST))

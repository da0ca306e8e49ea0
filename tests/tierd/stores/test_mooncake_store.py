"""The distributed store, on a real mooncake_master: what one service sees of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from mooncake_master import MIB, MooncakeMaster, opened, options_of, prefixes, puts
from store_blobs import blob_name, content, get, held, info_of, payload_of, put, reserve
from store_contract import StoreContract
from waiting import wait_for_async

from kvtier.errors import TierExhaustedError
from kvtier_tierd.stores.mooncake.link import MooncakeLink
from kvtier_tierd.stores.mooncake.options import MooncakeOptions
from kvtier_tierd.stores.mooncake.store import MooncakeStore, trailer

pytestmark = pytest.mark.usefixtures("mooncake")


@pytest.fixture(scope="module")
def link(master) -> Iterator[MooncakeLink]:
    """One client for all the stores of the contract: mounting a segment anew takes seconds."""
    link = MooncakeLink(options_of(master, segment_bytes=64 * MIB))
    asyncio.run(link.start())
    yield link
    asyncio.run(link.close())


class TestMooncakeStoreContract(StoreContract):
    @pytest.fixture(autouse=True)
    def _connected(self, link):
        self.link = link

    def make_store(self, directory, capacity_bytes, quotas):
        options = MooncakeOptions(
            capacity_bytes=capacity_bytes, buffer_bytes=16 * MIB, prefix=next(prefixes)
        )
        return MooncakeStore(options, quotas, link=self.link)

    # Pins are of a copy and bind no blob's room: see test_an_open_blob_is_a_copy_... below.
    pins = False
    test_what_is_read_or_written_leaves_no_room_until_that_is_over = None

    async def test_an_open_blob_is_a_copy_that_outlives_its_eviction(self):
        async with self.with_room(blobs=2) as store:
            await put(store, blob_name(0), payload_of(0))
            handle = await store.open(blob_name(0))
            for number in range(1, 5):
                await put(store, blob_name(number), payload_of(number))
            assert await held(store, 0, 3, 4) == [3, 4]
            assert content(handle) == payload_of(0)
            handle.close()


async def test_the_master_evicts_when_everything_is_full_and_lookups_notice(mooncake):
    with MooncakeMaster("--default_kv_lease_ttl=100") as alone:
        async with opened(options_of(alone, capacity_bytes=256 * MIB)) as store:
            with pytest.raises(TierExhaustedError, match="no room"):
                await put(store, blob_name(99), payload_of(99, 20 * MIB))
            assert store.stats().used_bytes == 0, "a blob that no segment holds"
            for number in range(40):
                await wait_for_async(lambda number=number: puts(store, number))
                assert await get(store, blob_name(number)) in (None, payload_of(number, MIB))
            there = await held(store, *range(40))
            assert 0 < len(there) < 20
            assert store.stats().blobs == len(there)


async def test_objects_that_are_no_blobs_are_misses_and_a_blob_beyond_the_buffer_is_refused(link):
    options = MooncakeOptions(buffer_bytes=MIB, prefix=next(prefixes))
    store = MooncakeStore(options, link=link)
    await store.start()
    whole = b"12" + trailer(info_of(b"12"))
    junk = (b"x", b"x" * 100, trailer(info_of(b"12")), whole[:-1], whole[1:])
    for number, content_ in enumerate((*junk, whole)):
        store.arena.memory[: len(content_)] = content_
        key = store._key(blob_name(number))
        assert await link.call("upsert_from", key, store._base, len(content_)) == 0
        assert await get(store, blob_name(number)) == (b"12" if content_ is whole else None)
    with pytest.raises(TierExhaustedError, match="--mooncake-buffer"):
        await reserve(store, blob_name(9), payload_of(9, 2 * MIB))
    await put(store, blob_name(9), payload_of(9))
    assert store.check_integrity() == []
    await store.close()


async def test_memory_under_a_call_that_was_given_up_is_not_used_again_before_it_ends(link):
    options = MooncakeOptions(buffer_bytes=4 * MIB, prefix=next(prefixes))
    store = MooncakeStore(options, link=link)
    await store.start()
    await put(store, blob_name(1), payload_of(1))
    reading, go, client = threading.Event(), threading.Event(), link._client

    def slow(*arguments: Any) -> Any:
        reading.set()
        go.wait()
        return client.get_into(*arguments)

    link._client = SimpleNamespace(get_size=client.get_size, get_into=slow)
    opening = asyncio.create_task(store.open(blob_name(1)))
    await asyncio.to_thread(reading.wait)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert len(store.arena._held) == 1
    go.set()
    link._client = client
    await wait_for_async(lambda: not store.arena._held)
    assert await get(store, blob_name(1)) == payload_of(1)
    await store.close()

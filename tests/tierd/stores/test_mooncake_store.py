"""The distributed store, on a real mooncake_master: what one service sees of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from mooncake_master import MIB, MooncakeMaster, opened, options_of, prefixes, puts
from mooncake_peer import MooncakePeer
from store_blobs import blob_name, content, get, held, info_of, payload_of, put, reserve
from store_contract import StoreContract
from waiting import be_slow_async, wait_for_async

from kvtier.errors import TierExhaustedError, UsageError
from kvtier_tierd.stores.mooncake.link import MooncakeLink
from kvtier_tierd.stores.mooncake.options import MooncakeOptions
from kvtier_tierd.stores.mooncake.store import MooncakeStore, trailer

pytestmark = pytest.mark.usefixtures("mooncake")

# ---- what every store does


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
    test_an_open_blob_is_not_evicted = None
    test_a_blob_opened_twice_is_pinned_until_both_are_closed = None
    test_a_hidden_blob_takes_room_until_its_last_reader_is_gone = None
    test_what_is_being_read_or_written_leaves_no_room = None

    async def test_an_open_blob_is_a_copy_that_outlives_its_eviction(self):
        async with self.with_room(blobs=2) as store:
            await put(store, blob_name(0), payload_of(0))
            handle = await store.open(blob_name(0))
            for number in range(1, 5):
                await put(store, blob_name(number), payload_of(number))
            assert await held(store, 0, 3, 4) == [3, 4]
            assert content(handle) == payload_of(0)
            handle.close()


# ---- room


async def test_the_master_evicts_when_everything_is_full_and_lookups_notice(mooncake):
    with MooncakeMaster("--default_kv_lease_ttl=100") as alone:
        async with opened(options_of(alone, capacity_bytes=256 * MIB)) as store:
            for number in range(40):
                await wait_for_async(lambda number=number: puts(store, number))
                assert await get(store, blob_name(number)) in (None, payload_of(number, MIB))
            there = await held(store, *range(40))
            assert 0 < len(there) < 20
            assert store.stats().blobs == len(there)


async def test_what_is_larger_than_the_staging_memory_is_refused(master):
    async with opened(options_of(master, buffer_bytes=MIB)) as store:
        with pytest.raises(TierExhaustedError, match="--mooncake-buffer"):
            await reserve(store, blob_name(1), payload_of(1, 2 * MIB))
        await put(store, blob_name(1), payload_of(1))


async def test_a_blob_that_no_segment_holds_is_no_room_and_gives_its_room_back(mooncake):
    with MooncakeMaster() as alone:
        async with opened(options_of(alone, capacity_bytes=64 * MIB)) as store:
            with pytest.raises(TierExhaustedError, match="no room"):
                await put(store, blob_name(1), payload_of(1, 20 * MIB))
            assert store.stats().used_bytes == 0
            await put(store, blob_name(2), payload_of(2))


async def test_a_segment_larger_than_the_memory_is_no_room(master):
    store = MooncakeStore(options_of(master, segment_bytes=1 << 50))
    with pytest.raises(TierExhaustedError, match="--mooncake-segment"):
        await store.start()
    await store.close()


# ---- what else may be


async def test_asking_for_nothing_is_no_question(master):
    async with opened(options_of(master)) as store:
        assert await store.exists([]) == []


async def test_a_name_that_no_object_can_have_is_refused(master):
    async with opened(options_of(master)) as store:
        with pytest.raises(UsageError, match=r"^namespace: expected"):
            await reserve(store, blob_name(1, "n" * 201), payload_of(1))


async def test_an_object_that_is_no_blob_is_a_miss(master):
    async with opened(options_of(master)) as store:
        for number, junk in enumerate((b"x", b"x" * 100, trailer(info_of(b"12")))):
            store.arena.memory[: len(junk)] = junk
            key = store._key(blob_name(number))
            assert await store._link.call("upsert_from", key, store._base, len(junk)) == 0
            assert await store.open(blob_name(number)) is None


async def test_two_services_that_put_the_same_blob_at_a_time_both_succeed(master):
    options = options_of(master, segment_bytes=128 * MIB)
    async with opened(options) as store:
        with MooncakePeer(options) as peer:
            for number in range(12):
                payload = payload_of(number, 4 * MIB)
                draft = await reserve(store, blob_name(number), payload)
                asked = asyncio.create_task(
                    asyncio.to_thread(peer.ask, "put", number, num_bytes=4 * MIB)
                )
                # Until the peer has made its payload, so that the two meet.
                await be_slow_async(0.002 * number)
                await store.commit(draft)
                assert await asked is True
                assert await get(store, blob_name(number)) == payload


async def test_memory_under_a_call_that_was_given_up_is_not_used_again_before_it_ends(link):
    options = MooncakeOptions(buffer_bytes=4 * MIB, prefix=next(prefixes))
    store = MooncakeStore(options, link=link)
    await store.start()
    await put(store, blob_name(1), payload_of(1))
    go, client = threading.Event(), link._client
    link._client = Slow(client, go)
    reading = asyncio.create_task(store.open(blob_name(1)))
    await wait_for_async(lambda: "get_into" in link._client.called)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert len(store.arena._held) == 1
    go.set()
    link._client = client
    await wait_for_async(lambda: all_free(store))
    assert await get(store, blob_name(1)) == payload_of(1)
    await store.close()


class Slow:
    """A client whose get_into waits for `go`."""

    def __init__(self, client: Any, go: threading.Event) -> None:
        self.client, self.go = client, go
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def get_into(self, *arguments: Any) -> Any:
        self.called.append("get_into")
        self.go.wait()
        return self.client.get_into(*arguments)


async def all_free(store: MooncakeStore) -> bool:
    return not store.arena._held

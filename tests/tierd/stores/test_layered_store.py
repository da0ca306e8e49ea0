"""Memory in front of a disk: the disk has what memory let go of, and costs it nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_blobs import SIZE, blob_name, get, held, info_of, memory_store, payload_of, put

from kvtier.errors import TierExhaustedError, TierUnavailableError
from kvtier_tierd.stores.arena import pages
from kvtier_tierd.stores.disk.medium import cost
from kvtier_tierd.stores.disk.store import DiskStore
from kvtier_tierd.stores.layered import LayeredStore
from kvtier_tierd.stores.memory import MemoryStore

COST = pages(SIZE)
DISK_COST = cost(info_of(payload_of(0)))


@contextlib.asynccontextmanager
async def layered(
    directory: Path, memory_blobs: int = 4, disk_bytes: int = 1 << 20
) -> AsyncIterator[LayeredStore]:
    memory, disk = memory_store(memory_blobs * COST), DiskStore(directory / "disk", disk_bytes)
    store = LayeredStore(memory, disk)
    await store.start()
    yield store
    await store.settle()
    assert store.check_integrity() == []
    pins = [entry.pins for entry in memory.account.entries.values()]
    pins += [entry.pins for entry in disk.account.entries.values()]
    assert not any(pins)
    assert memory.account.reserved.total() == disk.account.reserved.total() == 0
    await store.close()


async def test_what_memory_has_no_room_for_is_still_on_disk_and_comes_back(tmp_path):
    async with layered(tmp_path) as store:
        for number in range(12):
            await put(store, blob_name(number), payload_of(number))
            await store.settle()
        assert await held(store.memory, *range(12)) == [8, 9, 10, 11]
        assert await held(store, *range(12)) == list(range(12))
        for number in range(12):
            assert await get(store, blob_name(number)) == payload_of(number)
        assert await held(store.memory, 0, 11) == [11]
        assert store.shed == store.failed == 0


async def test_what_memory_serves_is_not_what_the_disk_evicts_nor_after_a_restart(tmp_path):
    async with layered(tmp_path, disk_bytes=4 * DISK_COST) as store:
        for number in range(10):
            await put(store, blob_name(number), payload_of(number))
            await store.settle()
            assert await get(store, blob_name(0)) == payload_of(0)
        assert await held(store.memory, 0) == [0]
        assert await held(store.disk, *range(10)) == [0, 7, 8, 9]
        store.touch([blob_name(7)])
    async with layered(tmp_path, disk_bytes=4 * DISK_COST) as store:
        for number in (10, 11):
            await put(store, blob_name(number), payload_of(number))
            await store.settle()
        assert await held(store.disk, *range(12)) == [0, 7, 10, 11]


async def test_what_waits_for_the_disk_takes_a_share_of_memory_and_no_more(tmp_path):
    async with layered(tmp_path, memory_blobs=16) as store:
        for number in range(20):
            await put(store, blob_name(number), payload_of(number))
            assert store._waiting_bytes <= 4 * COST
        assert store.stats().shed == store.shed > 0
        await store.settle()
        assert store._waiting_bytes == 0


async def test_a_blob_deleted_while_it_waits_for_the_disk_stays_deleted(tmp_path):
    async with layered(tmp_path) as store:
        await put(store, blob_name(1), payload_of(1))
        assert await store.delete(blob_name(1))
        await store.settle()
        assert await held(store, 1) == []


async def test_an_old_version_that_waits_for_the_disk_is_gone_though_the_new_one_never_gets_there(
    tmp_path,
):
    async with layered(tmp_path, memory_blobs=16) as store:
        await put(store, blob_name(1), payload_of("old"))
        for number in range(2, 5):
            await put(store, blob_name(number), payload_of(number))
        await put(store, blob_name(1), payload_of("new"))
        assert store.shed == 1, "the new one"
        await store.settle()
        assert await get(store, blob_name(1)) == payload_of("new")
        await store.memory.delete(blob_name(1))  # as evictions do
        assert await get(store, blob_name(1)) is None


@pytest.mark.parametrize("error", [TierExhaustedError("it is full"), ZeroDivisionError("a bug")])
async def test_an_old_version_on_disk_is_gone_where_the_new_one_cannot_be_written(
    tmp_path, monkeypatch, error
):
    async def fail(draft):
        await store.disk.abort(draft)
        raise error

    async with layered(tmp_path) as store:
        await put(store, blob_name(1), payload_of("old"))
        await store.settle()
        monkeypatch.setattr(store.disk, "commit", fail)
        await put(store, blob_name(1), payload_of("new"))
        await store.settle()
        assert store.shed == 1
        assert await get(store, blob_name(1)) == payload_of("new")
        await store.memory.delete(blob_name(1))  # as evictions do
        assert await get(store, blob_name(1)) is None


async def test_a_blob_that_is_replaced_while_it_is_written_to_disk_does_not_stay_there(
    tmp_path, monkeypatch
):
    async with layered(tmp_path, memory_blobs=16) as store:
        real, store.behind_bytes = store.disk.commit, COST

        async def commit(draft):
            await put(store, blob_name(1), payload_of("new"))
            await real(draft)

        monkeypatch.setattr(store.disk, "commit", commit)
        await put(store, blob_name(1), payload_of("old"))
        await store.settle()
        assert store.shed == 1, "the new one"
        assert await held(store.disk, 1) == []


@pytest.mark.parametrize("how", ["replace", "delete", "quarantine"])
async def test_what_happens_to_a_blob_while_it_is_promoted_is_not_undone(tmp_path, how):
    old, new = payload_of("old", 3 << 20), payload_of("new", 3 << 20)
    async with layered(tmp_path, memory_blobs=1000, disk_bytes=64 << 20) as store:
        await put(store.disk, blob_name(1), old)
        opening = asyncio.create_task(store.open(blob_name(1)))
        while not store.memory.account.reserved.total():
            await asyncio.sleep(0)
        if how == "replace":
            await put(store, blob_name(1), new)
        else:
            await getattr(store, how)(blob_name(1))
        (await opening).close()
        await store.settle()
        assert await get(store, blob_name(1)) == (new if how == "replace" else None)


async def test_a_reader_that_goes_away_while_a_blob_is_promoted_leaves_nothing_held(tmp_path):
    store = LayeredStore(MemoryStore(16 << 20), MemoryStore(16 << 20))
    await store.start()
    await put(store.disk, blob_name(1), payload_of(1, 6 << 20))
    cut_off = 0
    for turns in range(20):
        opening = asyncio.create_task(store.open(blob_name(1)))
        for _ in range(turns):
            await asyncio.sleep(0)
        cut_off += store.memory.account.reserved.total() > 0
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await opening).close()
        assert not any(entry.pins for entry in store.disk.account.entries.values())
        assert store.memory.account.reserved.total() == 0
    assert cut_off >= 5
    assert store.check_integrity() == []
    await store.close()


async def test_promoting_a_large_blob_keeps_no_other_call_waiting(tmp_path):
    store = LayeredStore(MemoryStore(64 << 20), MemoryStore(64 << 20))
    await store.start()
    await put(store.disk, blob_name(1), bytes(32 << 20))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    waiting = asyncio.create_task(others())
    (await store.open(blob_name(1))).close()
    assert turns >= 30
    waiting.cancel()
    await store.close()


async def test_a_disk_that_fails_costs_memory_nothing(tmp_path, caplog):
    class BrokenDisk(MemoryStore):
        async def open(self, name):
            raise TierUnavailableError("the disk is gone")

        async def delete(self, name):
            raise TierUnavailableError("the disk is gone")

        async def commit(self, draft):
            await self.abort(draft)
            raise ZeroDivisionError("a bug")

    store = LayeredStore(MemoryStore(8 * COST), BrokenDisk(1 << 20))
    await store.start()
    for number in range(30):
        await put(store, blob_name(number % 3), payload_of(number))
        assert await get(store, blob_name(number % 3)) == payload_of(number)
        assert await store.open(blob_name(99)) is None
    await asyncio.wait_for(store.settle(), 5)
    assert store.shed + store.failed >= 30
    assert caplog.text.count("the disk is gone") == 1, "said once, then counted"
    assert store.memory.check_integrity() == []
    await store.close()


@settings(max_examples=30)
@given(st.integers(0, 1 << 32))
def test_whatever_happens_at_once_the_layers_serve_what_was_stored(seed):
    chance = random.Random(seed)
    versions: dict[int, set[bytes]] = {number: set() for number in range(6)}

    async def one(store: LayeredStore) -> None:
        number = chance.randrange(6)
        name, step = blob_name(number), chance.randrange(5)
        if step < 2:
            payload = payload_of((number, chance.random()), chance.choice([100, SIZE, 3 * SIZE]))
            versions[number].add(payload)
            with contextlib.suppress(TierExhaustedError):
                await put(store, name, payload)
        elif step < 4:
            assert await get(store, name) in versions[number] | {None}
        else:
            await store.delete(name)

    async def play() -> None:
        with tempfile.TemporaryDirectory() as directory:
            async with layered(Path(directory)) as store:
                for _ in range(8):
                    await asyncio.gather(*(one(store) for _ in range(8)))

    asyncio.run(play())


async def test_many_readers_of_a_blob_on_disk_bring_one_copy_of_it_back(tmp_path):
    """Otherwise each takes room for its own from blobs that other clients want."""
    async with layered(tmp_path, memory_blobs=8) as store:
        await put(store.disk, blob_name(0), payload_of(0))
        for number in range(1, 8):
            await put(store.memory, blob_name(number), payload_of(number))
        handles = await asyncio.gather(*(store.open(blob_name(0)) for _ in range(24)))
        assert all(handle is not None for handle in handles)
        assert await held(store.memory, *range(8)) == list(range(8)), "no blob had to go"
        assert store.disk.budget.used_bytes == 0
        for handle in handles:
            handle.close()

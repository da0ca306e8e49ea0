"""The writing and reading of the disk store: commits share writes, bytes on disk and in memory have
limits, and whoever gives up waiting leaves everything in order.
"""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
from disk_play import COST, ROOM, opened, payload_files, play, read_some
from store_blobs import SIZE, blob_name, get, payload_of, put, reserve
from waiting import SAFETY_S, wait_for_async

from kvtier.errors import TierExhaustedError
from kvtier_tierd.limits import Budget
from kvtier_tierd.stores.disk.medium import DiskMedium
from kvtier_tierd.stores.disk.store import DiskStore


def test_commits_that_wait_for_each_other_share_a_write(directory, monkeypatch):
    batches = []
    write = DiskMedium.write

    def counting(self, payloads, *noted):
        batches.append(len(payloads))
        return write(self, payloads, *noted)

    monkeypatch.setattr(DiskMedium, "write", counting)

    async def scenario(store: DiskStore) -> None:
        drafts = [await reserve(store, blob_name(n), payload_of(n)) for n in range(50)]
        await asyncio.gather(*(store.commit(draft) for draft in drafts))
        assert len(await read_some(store, 50)) == 50

    play(directory, scenario)
    assert sum(batches) == 50
    assert len(batches) <= 4


async def test_a_writer_that_gives_up_waiting_leaves_everything_in_order(directory):
    async with opened(directory) as store:
        draft = await reserve(store, blob_name(0), payload_of(0))
        task = asyncio.create_task(store.commit(draft))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await put(store, blob_name(1), payload_of(1))
        assert await read_some(store) == [0, 1]


async def test_it_never_holds_more_bytes_on_disk_than_it_may(directory, monkeypatch):
    capacity, write = 20 * COST, DiskMedium.write

    def weighed(self, *batch):
        failed = write(self, *batch)
        sizes = [path.stat().st_blocks * 512 for path in payload_files(directory)]
        assert sum(sizes) + 4096 * len(sizes) <= capacity
        return failed

    monkeypatch.setattr(DiskMedium, "write", weighed)
    async with opened(directory, capacity) as store:

        async def one(number: int) -> None:
            chance = random.Random(number)
            for _ in range(20):
                name = blob_name(chance.randrange(15))
                await put(store, name, payload_of(number, chance.randrange(1, 5 * SIZE)))
                await get(store, name)

        await asyncio.gather(one(1), one(2), one(3))
        assert store.stats().evictions > 0


async def test_readers_that_go_before_the_payload_is_there_give_its_memory_back(tmp_path):
    """The next one reads it anew; a budget that is used up is said, and not a miss."""
    payload, reading, go_on = payload_of(1), threading.Event(), threading.Event()
    budget = Budget(2 * len(payload))
    store = DiskStore(tmp_path, ROOM, budget=budget)
    await store.start()
    for number in (1, 2):
        await put(store, blob_name(number), payload_of(number))
    real = store._medium.read

    def slow(row):
        reading.set()
        go_on.wait(SAFETY_S)
        return real(row)

    store._medium.read = slow
    gone = [asyncio.create_task(store.open(blob_name(1))) for _ in range(3)]
    await asyncio.to_thread(reading.wait, SAFETY_S)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    assert budget.used_bytes == len(payload), "the thread still fills it"
    with pytest.raises(TierExhaustedError, match="--transfer-memory"):
        await store.open(blob_name(2))
    go_on.set()
    await wait_for_async(lambda: not budget.used_bytes)
    assert await get(store, blob_name(1)) == payload
    assert budget.used_bytes == 0
    assert store.check_integrity() == []
    await store.close()

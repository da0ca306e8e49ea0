"""The contract of every store, whatever it keeps blobs in: subclass StoreContract, name a factory.

    class TestMemoryStore(StoreContract):
        @staticmethod
        def make_store(directory, capacity_bytes, quotas):
            return MemoryStore(capacity_bytes, quotas)

Stores charge blobs as they like; the tests find out what one costs and count in that.
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_blobs import blob_name, content, get, held, info_of, payload_of, put, reserve
from store_model import ALL_NAMES, STEPS, Model
from store_room_contract import RoomContract

from kvtier_tierd.stores.base import BlobName, BlobStore


class StoreContract(RoomContract):
    """See the module docstring, and the contract about room that it derives from."""

    def test_what_was_committed_is_what_is_read(self):
        async def scenario(store: BlobStore) -> None:
            payloads = [payload_of(size, size) for size in (1, 4095, 4096, 4097, 3_000_000)]
            for number, payload in enumerate(payloads):
                await put(store, blob_name(number), payload)
            for number, payload in enumerate(payloads):
                assert await get(store, blob_name(number)) == payload
            assert store.stats().blobs == len(payloads)

        self.run(scenario)

    def test_the_longest_names_and_layouts_are_kept(self):
        async def scenario(store: BlobStore) -> None:
            payload = payload_of(1)
            layout = payload_of(2, 4096)
            for namespace in ("n" * 200, "ü" * 100, "a"):
                name = BlobName(namespace, b"\xff" * 32)
                draft = await store.reserve(name, info_of(payload, layout))
                draft.buffer[:] = payload
                await store.commit(draft)
                handle = await store.open(name)
                assert handle.info == info_of(payload, layout)
                handle.close()
            assert store.stats().blobs == 3

        self.run(scenario)

    def test_what_is_not_there_is_none(self):
        async def scenario(store: BlobStore) -> None:
            await put(store, blob_name(1), payload_of(1))
            assert await held(store, 0, 1, 2) == [1]
            assert await store.open(blob_name(0)) is None
            assert await store.open(blob_name(1, "b")) is None
            assert not await store.delete(blob_name(0))
            await store.quarantine(blob_name(0))
            assert store.stats().quarantined == 0

        self.run(scenario)

    def test_namespaces_do_not_see_each_other(self):
        async def scenario(store: BlobStore) -> None:
            for namespace in ("a", "b", "a" + "b"):
                await put(store, blob_name(1, namespace), payload_of(namespace))
            assert await store.delete(blob_name(1, "b"))
            assert await get(store, blob_name(1, "a")) == payload_of("a")
            assert await get(store, blob_name(1, "ab")) == payload_of("ab")
            assert set(store.stats().namespaces) == {"a", "ab"}

        self.run(scenario)

    def test_a_draft_is_not_seen_before_it_is_committed(self):
        async def scenario(store: BlobStore) -> None:
            draft = await reserve(store, blob_name(1), payload_of(1))
            assert await held(store, 1) == []
            assert await store.open(blob_name(1)) is None
            await store.commit(draft)
            assert await held(store, 1) == [1]

        self.run(scenario)

    def test_a_replaced_blob_is_the_new_one_and_costs_once(self):
        async def scenario(store: BlobStore) -> None:
            await put(store, blob_name(1), payload_of("old"))
            before = store.stats().used_bytes
            draft = await reserve(store, blob_name(1), payload_of("new"))
            assert await get(store, blob_name(1)) == payload_of("old")
            await store.commit(draft)
            assert await get(store, blob_name(1)) == payload_of("new")
            assert (store.stats().used_bytes, store.stats().blobs) == (before, 1)

        self.run(scenario)

    def test_a_deleted_blob_is_gone_and_its_room_is_back(self):
        async def scenario(store: BlobStore) -> None:
            await put(store, blob_name(1), payload_of(1))
            assert await store.delete(blob_name(1))
            assert not await store.delete(blob_name(1))
            assert await held(store, 1) == []
            assert store.stats().used_bytes == 0
            await put(store, blob_name(1), payload_of(2))
            assert await get(store, blob_name(1)) == payload_of(2)

        self.run(scenario, blobs=1)

    def test_a_quarantined_blob_is_never_served_again(self):
        async def scenario(store: BlobStore) -> None:
            await put(store, blob_name(1), payload_of(1))
            await store.quarantine(blob_name(1))
            assert await held(store, 1) == []
            assert await store.open(blob_name(1)) is None
            assert store.stats().quarantined == 1
            assert store.stats().used_bytes == 0

        self.run(scenario)

    @pytest.mark.parametrize("how", ["delete", "quarantine", "replace"])
    def test_an_open_blob_outlives_its_name(self, how):
        async def scenario(store: BlobStore) -> None:
            await put(store, blob_name(1), payload_of("old"))
            handle = await store.open(blob_name(1))
            if how == "replace":
                await put(store, blob_name(1), payload_of("new"))
            else:
                await getattr(store, how)(blob_name(1))
                assert await store.open(blob_name(1)) is None
            for number in range(2, 6):
                await put(store, blob_name(number), payload_of(number))
            assert content(handle) == payload_of("old")
            handle.close()

        self.run(scenario, blobs=3)

    def test_an_open_blob_is_not_evicted(self):
        async def scenario(store: BlobStore) -> None:
            for number in range(3):
                await put(store, blob_name(number), payload_of(number))
            handle = await store.open(blob_name(0))
            for number in range(3, 9):
                await put(store, blob_name(number), payload_of(number))
            assert await held(store, 0, 1, 2, 7, 8) == [0, 7, 8]
            assert content(handle) == payload_of(0)
            handle.close()
            for number in range(9, 12):
                await put(store, blob_name(number), payload_of(number))
            assert await held(store, 0) == []

        self.run(scenario, blobs=3)

    def test_many_at_once_get_what_they_committed(self):
        async def scenario(store: BlobStore) -> None:
            async def one(number: int) -> None:
                payload = payload_of(number, 1000 + 777 * number)
                await put(store, blob_name(number), payload)
                assert await get(store, blob_name(number)) in (payload, None)
                if number % 3 == 0:
                    await store.delete(blob_name(number))
                    assert await store.open(blob_name(number)) is None

            await asyncio.gather(*(one(number) for number in range(40)))
            assert store.stats().blobs <= 26

        self.run(scenario, blobs=100)

    # Every subclass runs it, each on its own kind of store.
    @settings(max_examples=60, suppress_health_check=[HealthCheck.differing_executors])
    @given(st.lists(STEPS, max_size=40))
    def test_whatever_happens_it_serves_what_was_committed_and_keeps_its_limits(self, steps):
        async def play() -> None:
            quotas = {"a": 60_000}
            async with self.opened(128 << 10, quotas) as store:
                model = Model(store)
                for step, *arguments in steps:
                    await getattr(model, step)(*arguments)
                    await model.check(quotas)
                await model.settle()
                await model.check(quotas)
                for name in ALL_NAMES:
                    await model.delete(name)
                assert store.stats().used_bytes == 0
                # Nothing has leaked if there is room for something large again.
                await put(store, blob_name(0, "b"), payload_of(0, 100_000))

        asyncio.run(play())

"""The contract of every store, whatever it keeps blobs in: subclass StoreContract, name a factory.

    class TestMemoryStore(StoreContract):
        @staticmethod
        def make_store(directory, capacity_bytes, quotas):
            return MemoryStore(capacity_bytes, quotas)

Stores charge blobs as they like; the tests find out what one costs and count in that.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_blobs import SIZE, blob_name, content, get, held, info_of, payload_of, put, reserve
from store_model import ALL_NAMES, STEPS, Model

from kvtier.errors import TierExhaustedError
from kvtier_tierd.stores.base import BlobName, BlobStore


class StoreContract:
    """See the module docstring. room_bytes: a capacity no test fills by accident."""

    room_bytes = 16 << 20

    @staticmethod
    def make_store(
        directory: Path, capacity_bytes: int, quotas: Mapping[str, int] | None
    ) -> BlobStore:
        raise NotImplementedError

    @asynccontextmanager
    async def opened(self, capacity_bytes: int, quotas: Mapping[str, int] | None = None) -> Any:
        """A started store in a new place; healthy at the end."""
        with tempfile.TemporaryDirectory() as directory:
            store = self.make_store(Path(directory), capacity_bytes, quotas)
            await store.start()
            yield store
            assert store.check_integrity() == []
            await store.close()

    @asynccontextmanager
    async def with_room(self, blobs: float | None = None, quota: float | None = None) -> Any:
        """A store with room for so many blobs of SIZE. quota: blobs that namespace "a" may hold."""
        async with self.opened(self.room_bytes) as store:
            await put(store, blob_name(0), payload_of(0))
            cost = store.stats().used_bytes
        capacity = self.room_bytes if blobs is None else int(blobs * cost)
        quotas = None if quota is None else {"a": int(quota * cost)}
        async with self.opened(capacity, quotas) as store:
            yield store

    async def test_what_was_committed_is_what_is_read(self):
        async with self.with_room() as store:
            payloads = [payload_of(size, size) for size in (1, 4095, 4096, 4097, 3_000_000)]
            for number, payload in enumerate(payloads):
                await put(store, blob_name(number), payload)
            for number, payload in enumerate(payloads):
                assert await get(store, blob_name(number)) == payload
            assert store.stats().blobs == len(payloads)

    async def test_the_longest_names_and_layouts_are_kept(self):
        async with self.with_room() as store:
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

    async def test_what_is_not_there_is_none(self):
        async with self.with_room() as store:
            await put(store, blob_name(1), payload_of(1))
            assert await held(store, 0, 1, 2) == [1]
            assert await store.open(blob_name(0)) is None
            assert await store.open(blob_name(1, "b")) is None
            assert not await store.delete(blob_name(0))
            await store.quarantine(blob_name(0))
            assert store.stats().quarantined == 0

    async def test_namespaces_do_not_see_each_other(self):
        async with self.with_room() as store:
            for namespace in ("a", "b", "a" + "b"):
                await put(store, blob_name(1, namespace), payload_of(namespace))
            assert await store.delete(blob_name(1, "b"))
            assert await get(store, blob_name(1, "a")) == payload_of("a")
            assert await get(store, blob_name(1, "ab")) == payload_of("ab")
            assert set(store.stats().namespaces) == {"a", "ab"}

    async def test_a_draft_is_not_seen_before_it_is_committed(self):
        async with self.with_room() as store:
            draft = await reserve(store, blob_name(1), payload_of(1))
            assert await held(store, 1) == []
            assert await store.open(blob_name(1)) is None
            await store.commit(draft)
            assert await held(store, 1) == [1]

    async def test_a_replaced_blob_is_the_new_one_and_costs_once(self):
        async with self.with_room() as store:
            await put(store, blob_name(1), payload_of("old"))
            before = store.stats().used_bytes
            draft = await reserve(store, blob_name(1), payload_of("new"))
            assert await get(store, blob_name(1)) == payload_of("old")
            await store.commit(draft)
            assert await get(store, blob_name(1)) == payload_of("new")
            assert (store.stats().used_bytes, store.stats().blobs) == (before, 1)

    async def test_a_deleted_blob_is_gone_and_its_room_is_back(self):
        async with self.with_room(blobs=1) as store:
            await put(store, blob_name(1), payload_of(1))
            assert await store.delete(blob_name(1))
            assert not await store.delete(blob_name(1))
            assert await held(store, 1) == []
            assert store.stats().used_bytes == 0
            await put(store, blob_name(1), payload_of(2))
            assert await get(store, blob_name(1)) == payload_of(2)

    async def test_a_quarantined_blob_is_never_served_again(self):
        async with self.with_room() as store:
            await put(store, blob_name(1), payload_of(1))
            await store.quarantine(blob_name(1))
            assert await held(store, 1) == []
            assert await store.open(blob_name(1)) is None
            assert store.stats().quarantined == 1
            assert store.stats().used_bytes == 0

    @pytest.mark.parametrize("how", ["delete", "quarantine", "replace"])
    async def test_an_open_blob_outlives_its_name(self, how):
        async with self.with_room(blobs=3) as store:
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

    async def test_an_open_blob_is_not_evicted(self):
        async with self.with_room(blobs=3) as store:
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

    async def test_many_at_once_get_what_they_committed(self):
        async with self.with_room(blobs=100) as store:

            async def one(number: int) -> None:
                payload = payload_of(number, 1000 + 777 * number)
                await put(store, blob_name(number), payload)
                assert await get(store, blob_name(number)) in (payload, None)
                if number % 3 == 0:
                    await store.delete(blob_name(number))
                    assert await store.open(blob_name(number)) is None

            await asyncio.gather(*(one(number) for number in range(40)))
            assert store.stats().blobs <= 26

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

    # ---- room: limits that hold, and who goes first when it is short

    async def test_what_can_never_be_held_is_known_before_anything_of_it_is_there(self):
        async with self.with_room() as store:
            await put(store, blob_name(1), payload_of(1, 100))
            before = store.stats()
            fits, too_large = payload_of(2, 100), payload_of(3, self.room_bytes + 1)
            store.check(blob_name(2), info_of(fits))
            with pytest.raises(TierExhaustedError):
                store.check(blob_name(3), info_of(too_large))
            assert store.stats() == before

    async def test_a_blob_opened_twice_is_pinned_until_both_are_closed(self):
        async with self.with_room(blobs=1) as store:
            await put(store, blob_name(0), payload_of(0))
            first, second = await store.open(blob_name(0)), await store.open(blob_name(0))
            first.close()
            first.close()
            with pytest.raises(TierExhaustedError):
                await reserve(store, blob_name(1), payload_of(1))
            second.close()
            await put(store, blob_name(1), payload_of(1))
            assert await held(store, 0, 1) == [1]

    async def test_the_least_recently_used_blob_goes_first(self):
        async with self.with_room(blobs=4) as store:
            for number in range(4):
                await put(store, blob_name(number), payload_of(number))
            assert await get(store, blob_name(0)) == payload_of(0)
            assert await get(store, blob_name(2)) == payload_of(2)
            await put(store, blob_name(4), payload_of(4))
            assert await held(store, *range(5)) == [0, 2, 3, 4]
            await put(store, blob_name(5), payload_of(5))
            assert await held(store, *range(6)) == [0, 2, 4, 5]
            assert store.stats().evictions == 2

    async def test_asking_whether_a_blob_is_there_is_no_use_of_it(self):
        async with self.with_room(blobs=3) as store:
            for number in range(3):
                await put(store, blob_name(number), payload_of(number))
            assert await held(store, 0) == [0]
            await put(store, blob_name(3), payload_of(3))
            assert await held(store, *range(4)) == [1, 2, 3]

    async def test_a_touch_is_a_use_of_what_is_there(self):
        async with self.with_room(blobs=3) as store:
            for number in range(3):
                await put(store, blob_name(number), payload_of(number))
            store.touch([blob_name(1), blob_name(9), blob_name(0), blob_name(1, "b")])
            await put(store, blob_name(3), payload_of(3))
            assert await held(store, *range(10)) == [0, 1, 3]
            await put(store, blob_name(4), payload_of(4))
            assert await held(store, *range(10)) == [0, 3, 4]
            assert await get(store, blob_name(0)) == payload_of(0)

    async def test_what_is_larger_than_the_store_is_refused_and_evicts_nothing(self):
        async with self.with_room(blobs=2) as store:
            await put(store, blob_name(1), payload_of(1))
            with pytest.raises(TierExhaustedError):
                await store.reserve(blob_name(2), info_of(payload_of(2, 10 * SIZE)))
            assert await held(store, 1) == [1]

    async def test_a_quota_is_hard_and_binds_its_own_namespace_only(self):
        async with self.with_room(blobs=6, quota=2.5) as store:
            for number in range(3):
                await put(store, blob_name(number, "b"), payload_of(number))
            for number in range(5):
                await put(store, blob_name(number), payload_of(number))
            assert await held(store, *range(5)) == [3, 4]
            assert await get(store, blob_name(0, "b")) == payload_of(0)
            with pytest.raises(TierExhaustedError):
                await store.reserve(blob_name(9), info_of(payload_of(9, 4 * SIZE)))
            drafts = [await reserve(store, blob_name(n), payload_of(n)) for n in (5, 6)]
            with pytest.raises(TierExhaustedError):
                await reserve(store, blob_name(7), payload_of(7))
            for draft in drafts:
                await store.abort(draft)

    async def test_what_is_being_read_or_written_leaves_no_room(self):
        async with self.with_room(blobs=2) as store:
            await put(store, blob_name(0), payload_of(0))
            handle = await store.open(blob_name(0))
            draft = await reserve(store, blob_name(1), payload_of(1))
            with pytest.raises(TierExhaustedError):
                await reserve(store, blob_name(2), payload_of(2))
            assert await held(store, 0) == [0]
            handle.close()
            await store.commit(draft)
            await put(store, blob_name(2), payload_of(2))
            assert await held(store, 0, 1, 2) == [1, 2]

    async def test_a_hidden_blob_takes_room_until_its_last_reader_is_gone(self):
        async with self.with_room(blobs=1) as store:
            await put(store, blob_name(0), payload_of(0))
            first, last = await store.open(blob_name(0)), await store.open(blob_name(0))
            await store.delete(blob_name(0))
            first.close()
            with pytest.raises(TierExhaustedError):
                await reserve(store, blob_name(1), payload_of(1))
            assert content(last) == payload_of(0)
            last.close()
            await put(store, blob_name(1), payload_of(1))

    async def test_an_aborted_draft_gives_its_room_back(self):
        async with self.with_room(blobs=3) as store:
            for _ in range(5):
                drafts = [await reserve(store, blob_name(n), payload_of(n)) for n in range(3)]
                for draft in drafts:
                    await store.abort(draft)
            assert await held(store, 0, 1, 2) == []
            assert (store.stats().used_bytes, store.stats().evictions) == (0, 0)

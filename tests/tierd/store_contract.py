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
    """See the module docstring. room_bytes: a capacity no test fills by accident. pins: whether an
    open blob stays in the store."""

    room_bytes = 16 << 20
    pins = True

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

    @pytest.mark.parametrize(("namespace", "num_bytes"), [
        ("a", 1), ("n" * 200, 4096), ("ü" * 100, 4097), ("", 3_000_000),
    ])  # fmt: skip
    async def test_what_was_committed_is_what_is_read(self, namespace, num_bytes):
        async with self.with_room() as store:
            name, layout = BlobName(namespace, b"\xff" * 32), payload_of("layout", 4096)
            await put(store, name, payload_of(1, num_bytes), layout)
            assert await get(store, name, layout) == payload_of(1, num_bytes)
            assert store.stats().blobs == 1
            assert await store.exists([]) == []

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
                model = Model(store, self.pins)
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

    async def test_the_least_recently_used_blob_goes_first(self):
        async with self.with_room(blobs=4) as store:
            for number in range(4):
                await put(store, blob_name(number), payload_of(number))
            assert await get(store, blob_name(0)) == payload_of(0)
            store.touch([blob_name(3), blob_name(9), blob_name(1, "b")])
            assert await held(store, 1) == [1], "asking is no use of it"
            for number, left in ((4, [0, 2, 3, 4]), (5, [0, 3, 4, 5]), (6, [3, 4, 5, 6])):
                await put(store, blob_name(number), payload_of(number))
                assert await held(store, *range(10)) == left
            assert store.stats().evictions == 3

    async def test_what_is_larger_than_the_store_is_refused_and_evicts_nothing(self):
        async with self.with_room(blobs=2) as store:
            await put(store, blob_name(1), payload_of(1))
            before, large = store.stats(), info_of(payload_of(2, 10 * SIZE))
            store.check(blob_name(2), info_of(payload_of(2)))
            with pytest.raises(TierExhaustedError):
                store.check(blob_name(2), large)
            with pytest.raises(TierExhaustedError):
                await store.reserve(blob_name(2), large)
            assert store.stats() == before

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

    async def test_what_is_read_or_written_leaves_no_room_until_that_is_over(self):
        async with self.with_room(blobs=2) as store:

            async def is_full() -> None:
                with pytest.raises(TierExhaustedError):
                    await reserve(store, blob_name(2), payload_of(2))

            await put(store, blob_name(0), payload_of(0))
            first, last = await store.open(blob_name(0)), await store.open(blob_name(0))
            draft = await reserve(store, blob_name(1), payload_of(1))
            first.close()
            first.close()
            await is_full()
            assert await held(store, 0, 1) == [0]
            await store.delete(blob_name(0))
            await is_full()
            assert content(last) == payload_of(0)
            last.close()
            await store.commit(draft)
            await put(store, blob_name(2), payload_of(2))
            assert await held(store, 0, 1, 2) == [1, 2]

"""What every store must do, whatever it keeps blobs in: subclass StoreContract, name a factory.

    class TestMemoryStore(StoreContract):
        @staticmethod
        def make_store(directory, capacity_bytes, quotas):
            return MemoryStore(capacity_bytes, quotas)

Stores charge blobs as they like; the tests find out what one costs and count in that.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.errors import TierExhaustedError
from kvtier_tierd.stores.base import BlobInfo, BlobName, BlobStore, Draft, Handle

SIZE = 10_000
LAYOUT = b"a layout"


def blob_name(number: int, namespace: str = "a") -> BlobName:
    return BlobName(namespace, number.to_bytes(32, "big"))


def payload_of(seed: object, num_bytes: int = SIZE) -> bytes:
    return random.Random(repr(seed)).randbytes(num_bytes)


def info_of(payload: bytes, layout: bytes = LAYOUT) -> BlobInfo:
    return BlobInfo(len(payload), layout, xxhash.xxh3_128_digest(payload))


async def reserve(store: BlobStore, name: BlobName, payload: bytes) -> Draft:
    """A filled draft."""
    draft = await store.reserve(name, info_of(payload))
    draft.buffer[:] = payload
    return draft


async def put(store: BlobStore, name: BlobName, payload: bytes) -> None:
    await store.commit(await reserve(store, name, payload))


def content(handle: Handle) -> bytes:
    return b"".join(bytes(piece) for piece in handle.pieces)


async def get(store: BlobStore, name: BlobName) -> bytes | None:
    """The payload, after checking it against what came with it."""
    handle = await store.open(name)
    if handle is None:
        return None
    payload = content(handle)
    assert handle.info == info_of(payload, handle.info.layout)
    handle.close()
    return payload


async def held(store: BlobStore, *numbers: int) -> list[int]:
    """Which of the numbered blobs there are."""
    found = await store.exists([blob_name(number) for number in numbers])
    return [number for number, there in zip(numbers, found, strict=True) if there]


@dataclass
class Model:
    """What a store has been told, to compare it with what it says."""

    store: BlobStore
    committed: dict[BlobName, bytes] = field(default_factory=dict)
    drafts: list[tuple[Draft, bytes]] = field(default_factory=list)
    handles: list[tuple[Handle, bytes]] = field(default_factory=list)

    async def put(self, name: BlobName, payload: bytes) -> None:
        try:
            await put(self.store, name, payload)
        except TierExhaustedError:
            return
        self.committed[name] = payload

    async def reserve(self, name: BlobName, payload: bytes) -> None:
        try:
            self.drafts.append((await reserve(self.store, name, payload), payload))
        except TierExhaustedError:
            return

    async def commit(self, which: int) -> None:
        if self.drafts:
            draft, payload = self.drafts.pop(which % len(self.drafts))
            await self.store.commit(draft)
            self.committed[draft.name] = payload

    async def abort(self, which: int) -> None:
        if self.drafts:
            await self.store.abort(self.drafts.pop(which % len(self.drafts))[0])

    async def open(self, name: BlobName) -> None:
        (there,) = await self.store.exists([name])
        handle = await self.store.open(name)
        assert (handle is not None) == there
        if handle is not None:
            assert content(handle) == self.committed[name]
            self.handles.append((handle, self.committed[name]))

    async def close(self, which: int) -> None:
        if self.handles:
            handle, payload = self.handles.pop(which % len(self.handles))
            assert content(handle) == payload
            handle.close()
            handle.close()

    async def delete(self, name: BlobName) -> None:
        (there,) = await self.store.exists([name])
        assert await self.store.delete(name) == there
        self.committed.pop(name, None)

    async def quarantine(self, name: BlobName) -> None:
        await self.store.quarantine(name)
        self.committed.pop(name, None)

    async def settle(self) -> None:
        """End what is under way."""
        while self.drafts:
            await self.abort(0)
        while self.handles:
            await self.close(0)

    async def check(self, quotas: Mapping[str, int]) -> None:
        """Nothing unknown is held, and no more of it than allowed."""
        assert self.store.check_integrity() == []
        stats = self.store.stats()
        assert stats.used_bytes == sum(stats.namespaces.values()) <= stats.capacity_bytes
        assert all(stats.namespaces.get(one, 0) <= quota for one, quota in quotas.items())
        names = list(ALL_NAMES)
        there = await self.store.exists(names)
        assert stats.blobs == sum(there)
        assert all(name in self.committed for name, one in zip(names, there, strict=True) if one)


ALL_NAMES = [blob_name(number, namespace) for number in range(5) for namespace in "ab"]
NAMES = st.sampled_from(ALL_NAMES)
SIZES = st.one_of(st.integers(1, 20_000), st.sampled_from([1, 4096, 4097, 30_000, 200_000]))
PAYLOADS = st.builds(payload_of, st.integers(0, 99), SIZES)
WHICH = st.integers(0, 9)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["put", "reserve"]), NAMES, PAYLOADS),
    st.tuples(st.sampled_from(["open", "delete", "quarantine"]), NAMES),
    st.tuples(st.sampled_from(["commit", "abort", "close"]), WHICH),
)


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

    def run(
        self,
        scenario: Callable[[BlobStore], Awaitable[None]],
        blobs: float | None = None,
        quota: float | None = None,
    ) -> None:
        """Play a scenario on a store with room for so many blobs of SIZE.

        quota: blobs of SIZE that namespace "a" may hold.
        """

        async def play() -> None:
            async with self.opened(self.room_bytes) as store:
                await put(store, blob_name(0), payload_of(0))
                cost = store.stats().used_bytes
            capacity = self.room_bytes if blobs is None else int(blobs * cost)
            quotas = None if quota is None else {"a": int(quota * cost)}
            async with self.opened(capacity, quotas) as store:
                await scenario(store)

        asyncio.run(play())

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

    def test_what_can_never_be_held_is_known_before_anything_of_it_is_there(self):
        async def play(store: BlobStore) -> None:
            await put(store, blob_name(1), payload_of(1, 100))
            before = store.stats()
            fits, too_large = payload_of(2, 100), payload_of(3, self.room_bytes + 1)
            store.check(blob_name(2), info_of(fits))
            with pytest.raises(TierExhaustedError):
                store.check(blob_name(3), info_of(too_large))
            assert store.stats() == before

        self.run(play)

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

    def test_a_blob_opened_twice_is_pinned_until_both_are_closed(self):
        async def scenario(store: BlobStore) -> None:
            await put(store, blob_name(0), payload_of(0))
            first, second = await store.open(blob_name(0)), await store.open(blob_name(0))
            first.close()
            first.close()
            with pytest.raises(TierExhaustedError):
                await reserve(store, blob_name(1), payload_of(1))
            second.close()
            await put(store, blob_name(1), payload_of(1))
            assert await held(store, 0, 1) == [1]

        self.run(scenario, blobs=1)

    def test_the_least_recently_used_blob_goes_first(self):
        async def scenario(store: BlobStore) -> None:
            for number in range(4):
                await put(store, blob_name(number), payload_of(number))
            assert await get(store, blob_name(0)) == payload_of(0)
            assert await get(store, blob_name(2)) == payload_of(2)
            await put(store, blob_name(4), payload_of(4))
            assert await held(store, *range(5)) == [0, 2, 3, 4]
            await put(store, blob_name(5), payload_of(5))
            assert await held(store, *range(6)) == [0, 2, 4, 5]
            assert store.stats().evictions == 2

        self.run(scenario, blobs=4)

    def test_asking_whether_a_blob_is_there_is_no_use_of_it(self):
        async def scenario(store: BlobStore) -> None:
            for number in range(3):
                await put(store, blob_name(number), payload_of(number))
            assert await held(store, 0) == [0]
            await put(store, blob_name(3), payload_of(3))
            assert await held(store, *range(4)) == [1, 2, 3]

        self.run(scenario, blobs=3)

    def test_a_touch_is_a_use_of_what_is_there(self):
        async def scenario(store: BlobStore) -> None:
            for number in range(3):
                await put(store, blob_name(number), payload_of(number))
            store.touch([blob_name(1), blob_name(9), blob_name(0), blob_name(1, "b")])
            await put(store, blob_name(3), payload_of(3))
            assert await held(store, *range(10)) == [0, 1, 3]
            await put(store, blob_name(4), payload_of(4))
            assert await held(store, *range(10)) == [0, 3, 4]
            assert await get(store, blob_name(0)) == payload_of(0)

        self.run(scenario, blobs=3)

    def test_what_is_larger_than_the_store_is_refused_and_evicts_nothing(self):
        async def scenario(store: BlobStore) -> None:
            await put(store, blob_name(1), payload_of(1))
            with pytest.raises(TierExhaustedError):
                await store.reserve(blob_name(2), info_of(payload_of(2, 10 * SIZE)))
            assert await held(store, 1) == [1]

        self.run(scenario, blobs=2)

    def test_a_quota_is_hard_and_binds_its_own_namespace_only(self):
        async def scenario(store: BlobStore) -> None:
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

        self.run(scenario, blobs=6, quota=2.5)

    def test_what_is_being_read_or_written_leaves_no_room(self):
        async def scenario(store: BlobStore) -> None:
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

        self.run(scenario, blobs=2)

    def test_a_hidden_blob_takes_room_until_its_last_reader_is_gone(self):
        async def scenario(store: BlobStore) -> None:
            await put(store, blob_name(0), payload_of(0))
            handle = await store.open(blob_name(0))
            await store.delete(blob_name(0))
            with pytest.raises(TierExhaustedError):
                await reserve(store, blob_name(1), payload_of(1))
            handle.close()
            await put(store, blob_name(1), payload_of(1))

        self.run(scenario, blobs=1)

    def test_an_aborted_draft_gives_its_room_back(self):
        async def scenario(store: BlobStore) -> None:
            for _ in range(5):
                drafts = [await reserve(store, blob_name(n), payload_of(n)) for n in range(3)]
                for draft in drafts:
                    await store.abort(draft)
            assert await held(store, 0, 1, 2) == []
            assert (store.stats().used_bytes, store.stats().evictions) == (0, 0)

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

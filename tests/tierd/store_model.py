"""A model of what a store has been told, and random steps to play on both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hypothesis import strategies as st
from store_blobs import blob_name, content, payload_of, put, reserve

from kvtier.errors import TierExhaustedError
from kvtier_tierd.stores.base import BlobName, BlobStore, Draft, Handle


@dataclass
class Model:
    """A model of what a store has been told, to compare it with what it says. pins: whether an
    open blob stays in it."""

    store: BlobStore
    pins: bool = True
    committed: dict[BlobName, bytes] = field(default_factory=dict)
    drafts: list[tuple[Draft, bytes]] = field(default_factory=list)
    handles: list[tuple[Handle, bytes, BlobName | None]] = field(default_factory=list)
    quarantined: int = 0

    async def put(self, name: BlobName, payload: bytes) -> None:
        try:
            await put(self.store, name, payload)
        except TierExhaustedError:
            return
        await self._holds(name, payload)

    async def _holds(self, name: BlobName, payload: bytes) -> None:
        """A payload was committed, and is there."""
        assert await self.store.exists([name]) == [True]
        self._hide(name)
        self.committed[name] = payload

    def _hide(self, name: BlobName) -> None:
        """The name stands for nothing any more that is open now."""
        self.committed.pop(name, None)
        self.handles = [
            (handle, payload, None if own == name else own) for handle, payload, own in self.handles
        ]

    async def reserve(self, name: BlobName, payload: bytes) -> None:
        try:
            self.drafts.append((await reserve(self.store, name, payload), payload))
        except TierExhaustedError:
            return

    async def commit(self, which: int) -> None:
        if self.drafts:
            draft, payload = self.drafts.pop(which % len(self.drafts))
            await self.store.commit(draft)
            await self._holds(draft.name, payload)

    async def abort(self, which: int) -> None:
        if self.drafts:
            await self.store.abort(self.drafts.pop(which % len(self.drafts))[0])

    async def open(self, name: BlobName) -> None:
        (there,) = await self.store.exists([name])
        handle = await self.store.open(name)
        assert (handle is not None) == there
        if handle is not None:
            assert content(handle) == self.committed[name]
            self.handles.append((handle, self.committed[name], name))

    async def close(self, which: int) -> None:
        if self.handles:
            handle, payload, _ = self.handles.pop(which % len(self.handles))
            assert content(handle) == payload
            handle.close()
            handle.close()

    async def delete(self, name: BlobName) -> None:
        (there,) = await self.store.exists([name])
        assert await self.store.delete(name) == there
        self._hide(name)

    async def quarantine(self, name: BlobName) -> None:
        self.quarantined += sum(await self.store.exists([name]))
        await self.store.quarantine(name)
        self._hide(name)

    async def settle(self) -> None:
        """End what is under way."""
        while self.drafts:
            await self.abort(0)
        while self.handles:
            await self.close(0)

    async def check(self, quotas: Mapping[str, int]) -> None:
        """Check that nothing unknown is held, and no more of it than allowed."""
        assert self.store.check_integrity() == []
        stats = self.store.stats()
        assert stats.used_bytes == sum(stats.namespaces.values()) <= stats.capacity_bytes
        assert all(stats.namespaces.get(one, 0) <= quota for one, quota in quotas.items())
        names = list(ALL_NAMES)
        there = await self.store.exists(names)
        assert stats.blobs == sum(there)
        found = {name for name, one in zip(names, there, strict=True) if one}
        assert found <= self.committed.keys()
        assert stats.quarantined == self.quarantined
        if self.pins:
            assert {name for _, _, name in self.handles if name is not None} <= found


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

"""The stage of the tests of the disk store, which play a scenario on one directory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from store_blobs import blob_name, get, info_of, payload_of, put

from kvtier_tierd.stores.disk.medium import cost
from kvtier_tierd.stores.disk.store import DiskStore

COST = cost(info_of(payload_of(0)))
ROOM = 100 * COST


@asynccontextmanager
async def opened(directory: Path, capacity_bytes: int = ROOM, quotas: Any = None) -> Any:
    """A store that is healthy at the end, and closed."""
    store = DiskStore(directory, capacity_bytes, quotas)
    await store.start()
    try:
        yield store
        assert store.check_integrity() == []
    finally:
        await store.close()


def play(directory: Path, scenario: Callable[[DiskStore], Awaitable[Any]], *arguments: Any) -> Any:
    """Start the store, play, close it."""

    async def run() -> Any:
        async with opened(directory, *arguments) as store:
            return await scenario(store)

    return asyncio.run(run())


async def put_some(store: DiskStore, count: int = 4) -> None:
    for number in range(count):
        await put(store, blob_name(number), payload_of(number))


async def read_some(store: DiskStore, count: int = 4) -> list[int]:
    """The numbers of those blobs that are there and right."""
    found = [await get(store, blob_name(number)) for number in range(count)]
    assert all(one in (None, payload_of(number)) for number, one in enumerate(found))
    return [number for number, one in enumerate(found) if one is not None]


def payload_files(directory: Path) -> list[Path]:
    return sorted((directory / "payload").iterdir())

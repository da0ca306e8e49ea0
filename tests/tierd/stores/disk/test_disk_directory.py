"""The places where a disk store may be, and who may enter."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from disk_play import ROOM, payload_files, play, put_some, read_some

from kvtier.errors import TierUnavailableError
from kvtier_tierd.stores.disk.store import DiskStore


def test_a_directory_belongs_to_one_service_at_a_time(directory):
    async def scenario(store: DiskStore) -> None:
        second = DiskStore(directory, ROOM)
        with pytest.raises(TierUnavailableError, match=f"{directory}: another service"):
            await second.start()
        await second.close()
        await put_some(store)
        assert await read_some(store) == [0, 1, 2, 3]

    play(directory, scenario)
    play(directory, read_some)


@pytest.mark.parametrize("path", ["{tmp}/file", "{tmp}/file/below", "/proc/kvtier"])
def test_a_place_that_cannot_be_one_is_named(tmp_path, path):
    (tmp_path / "file").write_text("")
    directory = Path(path.format(tmp=tmp_path))

    async def run() -> None:
        store = DiskStore(directory, ROOM)
        with pytest.raises(TierUnavailableError, match=str(directory)):
            await store.start()
        await store.close()

    asyncio.run(run())


def test_only_the_owner_may_enter(directory):
    play(directory, put_some)
    for path in (directory, directory / "index", directory / "payload"):
        assert path.stat().st_mode & 0o777 == 0o700
    for path in (directory / "lock", directory / "index" / "data.mdb", *payload_files(directory)):
        assert path.stat().st_mode & 0o777 == 0o600

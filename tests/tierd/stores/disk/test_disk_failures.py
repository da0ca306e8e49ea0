"""A disk that is full, fails or is not to be had: a typed error, nothing else lost, and all is well
when it works.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest
from disk_play import ROOM, opened, payload_files, play, put_some, read_some
from store_blobs import blob_name, get, info_of, payload_of, put

from kvtier.errors import TierExhaustedError, TierUnavailableError
from kvtier_tierd.stores.disk import index as disk_index
from kvtier_tierd.stores.disk.store import DiskStore


def failing(call: Callable[..., Any], number: int, times: int = 1 << 30) -> Callable[..., Any]:
    """`call`, but for the first so many times the operating system says no."""
    left = [times]

    def fails(*arguments: Any, **keywords: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, os.strerror(number))
        return call(*arguments, **keywords)

    return fails


async def test_a_payload_that_cannot_be_read_costs_one_blob(directory, monkeypatch):
    """Its file is gone, cut short, or on a sector that is broken."""
    async with opened(directory) as store:
        await put_some(store)
        missing, short, *_ = payload_files(directory)
        missing.unlink()
        os.truncate(short, 5)
        (left, last) = await read_some(store)
        with monkeypatch.context() as broken:
            broken.setattr("builtins.open", failing(open, errno.EIO))
            assert await store.open(blob_name(left)) is None
        assert await read_some(store) == [last]
        assert (store.stats().quarantined, store.stats().blobs) == (3, 1)


async def test_no_more_open_files_is_not_the_fault_of_a_blob(directory, monkeypatch):
    async with opened(directory) as store:
        await put_some(store)
        with monkeypatch.context() as broken:
            broken.setattr("builtins.open", failing(open, errno.EMFILE))
            with pytest.raises(TierUnavailableError, match=str(directory)):
                await store.open(blob_name(0))
        assert await read_some(store) == [0, 1, 2, 3]


async def test_a_full_disk_evicts_and_tries_again_and_gives_up_in_the_end(directory, monkeypatch):
    async with opened(directory) as store:
        await put_some(store, 8)
        with monkeypatch.context() as full:
            full.setattr(os, "write", failing(os.write, errno.ENOSPC, times=1))
            await put(store, blob_name(8), payload_of(8))
        assert await read_some(store, 9) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert store.stats().evictions == 1
        with monkeypatch.context() as full:
            full.setattr(os, "write", failing(os.write, errno.EDQUOT))
            with pytest.raises(TierExhaustedError, match=f"{directory}: the disk is full"):
                await put(store, blob_name(9), payload_of(9))
        assert await read_some(store, 10) == [3, 4, 5, 6, 7, 8]
        # The draft's room is back: the whole capacity can be filled.
        await put(store, blob_name(9), payload_of(9, ROOM - 4 * 4096))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB; only root may have one."""
    disk = tmp_path / "small"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount a small disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("free_blocks", [1, 7])
def test_an_index_that_a_full_disk_has_no_room_for_is_no_damage(small_disk, free_blocks):
    """LMDB calls a write that ends early an I/O error."""
    neighbour = small_disk / "neighbour"
    info = info_of(payload_of(0))
    rows = {blob_name(n): disk_index.Row(f"{n:032x}", info, n) for n in range(400)}
    index = disk_index.DiskIndex(small_disk / "index")
    index.directory.mkdir()
    assert index.open() == {}
    with neighbour.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(neighbour, neighbour.stat().st_size - 4096 * free_blocks)
    with pytest.raises(OSError, match="no room for the index") as caught:
        index.write(rows)
    assert caught.value.errno == errno.ENOSPC
    neighbour.unlink()
    index.write(rows)
    assert index.rows() == rows
    index.close()


@pytest.mark.parametrize(
    ("call", "number"), [("open", errno.EROFS), ("write", errno.EIO), ("fdatasync", errno.EIO)]
)
async def test_a_disk_that_cannot_be_written_is_unavailable_until_it_can(
    directory, monkeypatch, call, number
):
    store = DiskStore(directory, ROOM)
    await store.start()
    await put_some(store)
    with monkeypatch.context() as broken:
        broken.setattr(os, call, failing(getattr(os, call), number))
        with pytest.raises(TierUnavailableError, match=str(directory)):
            await put(store, blob_name(3), payload_of("new"))
    assert await read_some(store) == [0, 1, 2, 3]
    assert len(payload_files(directory)) == 4
    await put(store, blob_name(3), payload_of("new"))
    assert await get(store, blob_name(3)) == payload_of("new")
    assert store.check_integrity() == []
    await store.close()


async def test_puts_that_a_read_only_disk_refuses_leave_nothing_to_write_later(
    directory, monkeypatch
):
    async with opened(directory) as store:
        await put_some(store)
        assert await read_some(store, 1) == [0]
        with monkeypatch.context() as broken:
            broken.setattr(os, "open", failing(os.open, errno.EROFS))
            broken.setattr(disk_index.DiskIndex, "write", failing(print, errno.EROFS))
            for number in range(100, 150):
                with pytest.raises(TierUnavailableError, match=str(directory)):
                    await put(store, blob_name(number), payload_of(number))
        assert list(store._writer.changed) == [blob_name(0)], "the use"
        await put(store, blob_name(4), payload_of(4))
        assert await read_some(store, 5) == [0, 1, 2, 3, 4]


def test_what_does_not_reach_the_index_is_said_and_loses_nothing_else(directory, monkeypatch):
    def fail(row: disk_index.Row) -> None:
        raise lmdb.DiskError("no", errno.EIO)

    async def scenario(store: DiskStore) -> None:
        await put_some(store, 5)
        await store.delete(blob_name(0))
        with monkeypatch.context() as broken:
            broken.setattr(disk_index, "_encode", fail)
            for number in (1, 5):
                with pytest.raises(TierUnavailableError, match=str(directory)):
                    await put(store, blob_name(number), payload_of("new"))
        with monkeypatch.context() as broken:
            broken.setattr(Path, "unlink", failing(Path.unlink, errno.EROFS))
            with pytest.raises(TierUnavailableError, match=str(directory)):
                await store.quarantine(blob_name(2))
        assert await read_some(store, 6) == [1, 3, 4], "a quarantine holds all the same"
        assert store.stats().quarantined == 1
        await put(store, blob_name(5), payload_of(5))

    play(directory, scenario)
    assert play(directory, lambda store: read_some(store, 6)) == [1, 3, 4, 5]


def test_a_directory_is_its_owners_and_belongs_to_one_service_at_a_time(directory):
    async def scenario(store: DiskStore) -> None:
        second = DiskStore(directory, ROOM)
        with pytest.raises(TierUnavailableError, match=f"{directory}: another service"):
            await second.start()
        await second.close()
        await put_some(store)
        assert await read_some(store) == [0, 1, 2, 3]

    play(directory, scenario)
    assert play(directory, read_some) == [0, 1, 2, 3]
    for path in (directory, directory / "index", directory / "payload"):
        assert path.stat().st_mode & 0o777 == 0o700
    for path in (directory / "lock", directory / "index" / "data.mdb", *payload_files(directory)):
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("path", ["{tmp}/file", "{tmp}/file/below", "/proc/kvtier"])
async def test_a_place_that_cannot_be_one_is_named(tmp_path, path):
    (tmp_path / "file").write_text("")
    directory = Path(path.format(tmp=tmp_path))
    store = DiskStore(directory, ROOM)
    with pytest.raises(TierUnavailableError, match=str(directory)):
        await store.start()
    await store.close()

"""A disk store whose files are not whole or not its own: dropped or set aside, never believed."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb
import pytest
from disk_play import opened, payload_files, play, put_some, read_some
from hypothesis import given, settings
from hypothesis import strategies as st
from store_blobs import SIZE, blob_name, get, info_of, payload_of, put

from kvtier_tierd.stores.disk import index as disk_index
from kvtier_tierd.stores.disk.store import DiskStore


def test_what_is_not_whole_is_dropped_at_the_start(directory):
    async def read(store: DiskStore) -> list[int]:
        return await read_some(store)

    play(directory, put_some)
    missing, short, *_ = payload_files(directory)
    missing.unlink()
    os.truncate(short, SIZE - 1)
    orphan = directory / "payload" / f"{'0' * 32}.kv"
    orphan.write_bytes(b"half a payload")
    assert len(play(directory, read)) == 2
    assert len(payload_files(directory)) == 2
    assert len(play(directory, read)) == 2


def test_files_that_are_not_its_own_are_left_alone(directory):
    play(directory, put_some)
    for place in (directory, directory / "payload"):
        (place / "notes.txt").write_text("mine")
    play(directory, read_some)
    assert (directory / "notes.txt").read_text() == "mine"
    assert (directory / "payload" / "notes.txt").read_text() == "mine"


def newer_index(index: Path) -> None:
    with lmdb.open(str(index)) as environment, environment.begin(write=True) as transaction:
        transaction.put(disk_index.FORMAT_KEY, disk_index.FORMAT + b"1")


def nonsense_row(index: Path) -> None:
    with lmdb.open(str(index)) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"k" * 40, b"short")


def garbage(index: Path) -> None:
    (index / "data.mdb").write_bytes(os.urandom(50_000))


def emptied(index: Path) -> None:
    os.truncate(index / "data.mdb", 0)


@pytest.mark.parametrize("damage", [newer_index, nonsense_row, garbage, emptied])
def test_an_index_that_is_not_ours_is_set_aside(directory, caplog, damage):
    play(directory, put_some)
    damage(directory / "index")
    assert play(directory, read_some) == []
    assert payload_files(directory) == [], "what they were is not known any more"
    (aside,) = directory.glob("damaged-*")
    assert (aside / "data.mdb").exists()
    assert f"starting empty; the index is now {aside}" in caplog.text
    play(directory, put_some)
    assert play(directory, read_some) == [0, 1, 2, 3]
    garbage(directory / "index")
    play(directory, put_some)
    assert len(list(directory.glob("damaged-*"))) == 1, "only the latest is kept"


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=3))
def test_flipped_bits_in_the_index_are_never_believed(tmp_path_factory, flips):
    """It starts, whatever is there; what it then serves is what was stored."""
    directory = tmp_path_factory.mktemp("disk")
    play(directory, put_some)
    index = directory / "index" / "data.mdb"
    data = bytearray(index.read_bytes())
    for place, flip in flips:
        data[int(place * (len(data) - 1))] ^= flip
    index.write_bytes(data)

    async def read(store: DiskStore) -> None:
        for number in range(4):
            handle = await store.open(blob_name(number))
            if handle is not None and handle.info == info_of(payload_of(number)):
                assert bytes(handle.pieces[0]) == payload_of(number)
            if handle is not None:
                handle.close()
        await put(store, blob_name(9), payload_of(9))
        assert await get(store, blob_name(9)) == payload_of(9)

    play(directory, read)


async def test_a_payload_that_is_gone_or_cut_short_is_a_miss(directory):
    async with opened(directory) as store:
        await put_some(store)
        missing, short, *_ = payload_files(directory)
        missing.unlink()
        os.truncate(short, 5)
        assert len(await read_some(store)) == 2
        assert (store.stats().quarantined, store.stats().blobs) == (2, 2)

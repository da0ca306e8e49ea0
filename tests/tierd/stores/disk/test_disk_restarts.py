"""The disk store over restarts, kills, fewer bytes and damage: what was committed and is whole is
there afterwards."""

from __future__ import annotations

import json
import os
from pathlib import Path

import lmdb
import pytest
from disk_play import COST, ROOM, payload_files, play, put_some, read_some
from hypothesis import given, settings
from hypothesis import strategies as st
from store_blobs import SIZE, blob_name, get, held, info_of, payload_of, put
from store_model import ALL_NAMES, STEPS, Model

from benchmarks.tier import crash as tier_crash
from kvtier_tierd.stores.base import BlobName
from kvtier_tierd.stores.disk import index as disk_index
from kvtier_tierd.stores.disk.store import DiskStore


def test_blobs_outlive_the_store_with_everything_that_came_with_them(directory, monkeypatch):
    """The index has as much room as its rows need, however little it begins with."""
    monkeypatch.setattr(disk_index, "FIRST_MAP_BYTES", 10 * 4096)
    layout = payload_of("layout", 4096)
    names = [
        BlobName("ü" * 100, b"\0" * 32),
        BlobName("", b"\xff" * 32),
        *map(blob_name, range(98)),
    ]

    async def write(store: DiskStore) -> None:
        for number, name in enumerate(names):
            await put(store, name, payload_of(number), layout)

    async def read(store: DiskStore) -> None:
        for number, name in enumerate(names):
            assert await get(store, name, layout) == payload_of(number)
        assert store.stats().blobs == len(names)

    play(directory, write, 2 * ROOM)
    play(directory, read, 2 * ROOM)


@settings(max_examples=30)
@given(st.lists(STEPS, max_size=30))
def test_a_restart_changes_neither_the_blobs_nor_who_goes_first(tmp_path_factory, steps):
    directory, capacity = tmp_path_factory.mktemp("disk"), 128 << 10

    async def write(store: DiskStore) -> list[BlobName]:
        model = Model(store)
        for step, *arguments in steps:
            await getattr(model, step)(*arguments)
        await model.settle()
        kept.update({name: model.committed[name] for name in store.account.entries})
        return list(store.account.entries)

    async def read(store: DiskStore) -> list[BlobName]:
        order = list(store.account.entries)
        for name in ALL_NAMES:
            assert await get(store, name) == kept.get(name)
        return order

    kept: dict[BlobName, bytes] = {}
    written = play(directory, write, capacity)
    assert play(directory, read, capacity) == written


def test_a_thousand_kills_in_small(tmp_path):
    """benchmarks.tier.crash is the same, 1000 times: nothing is corrupt, outdated, back or lost."""
    out = tmp_path / "out.json"
    assert tier_crash.main(["--kills", "10", "--seed", "1", "--out", str(out)]) == 0
    counted = json.loads(out.read_text())["outcome"]
    for what in ("interrupted", "leftover_files", "blobs_that_must_be_there"):
        assert counted[what] > 0


def test_the_journal_of_kills_sees_every_kind_of_failure():
    def judged(lines: list[str], found: int | None) -> tier_crash.Outcome:
        outcome, journal = tier_crash.Outcome(), tier_crash.Journal()
        journal.read(lines, outcome)
        journal.judge(1, found, outcome)
        return outcome

    put_twice = ["put 1 7 100", "done 1", "put 1 8 100", "done 1"]
    assert judged(put_twice, 8).failures == 0
    assert judged(put_twice, 7).outdated == 1
    assert judged(put_twice, None).lost == 1
    assert judged(put_twice[:3], 7).failures == judged(put_twice[:3], 8).failures == 0
    assert judged(put_twice[:3], None).lost == 1
    assert judged([*put_twice, "delete 1"], None).failures == 0
    assert judged([*put_twice, "delete 1", "done 1"], 8).came_back == 1
    evicted = [*put_twice, f"put 2 1 {tier_crash.CAPACITY_BYTES}", "done 2"]
    assert judged(evicted, None).failures == 0


def test_less_capacity_than_before_keeps_what_was_used_last(directory):
    async def use(store: DiskStore) -> None:
        await put_some(store)
        await get(store, blob_name(0))

    async def read(store: DiskStore) -> list[int]:
        assert len(payload_files(directory)) == store.stats().blobs
        return await held(store, 0, 1, 2, 3)

    play(directory, use)
    assert play(directory, read, 2 * COST) == [0, 3]
    assert play(directory, read, 2 * COST, {"a": COST}) == [0]
    assert play(directory, read, 2 * COST, {"b": COST}) == [0]


# ---- files that are not whole or not its own: dropped or set aside, never believed


def test_what_is_not_whole_is_dropped_and_what_is_not_its_own_is_left_alone(directory):
    play(directory, put_some)
    missing, short, *_ = payload_files(directory)
    missing.unlink()
    os.truncate(short, SIZE - 1)
    (directory / "payload" / f"{'0' * 32}.kv").write_bytes(b"half a payload")
    notes = [directory / "notes.txt", directory / "payload" / "notes.txt"]
    for path in notes:
        path.write_text("mine")
    for _ in range(2):
        assert len(play(directory, read_some)) == 2
        assert len(payload_files(directory)) == 2 + 1
    assert [path.read_text() for path in notes] == ["mine", "mine"]


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

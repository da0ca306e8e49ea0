"""The disk store: what survives, what is thrown away, and what a disk may do to it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import shutil
import subprocess
import threading
from argparse import Namespace
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_contract import (
    ALL_NAMES,
    SIZE,
    STEPS,
    Model,
    StoreContract,
    blob_name,
    get,
    held,
    info_of,
    payload_of,
    put,
    reserve,
)

from benchmarks.tier import crash as tier_crash
from kvtier.errors import TierExhaustedError, TierUnavailableError, UsageError
from kvtier_tierd.limits.budget import Budget
from kvtier_tierd.stores.base import BlobInfo, BlobName
from kvtier_tierd.stores.disk import index as disk_index
from kvtier_tierd.stores.disk.medium import DiskMedium, cost
from kvtier_tierd.stores.disk.store import DiskStore

COST = cost(info_of(payload_of(0)))
ROOM = 100 * COST


class TestDiskStoreContract(StoreContract):
    @staticmethod
    def make_store(directory, capacity_bytes, quotas):
        return DiskStore(directory / "disk", capacity_bytes, quotas, sync=False)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "disk"


@asynccontextmanager
async def opened(directory: Path, capacity_bytes: int = ROOM, quotas: Any = None) -> Any:
    """A store that is healthy at the end, and closed."""
    store = DiskStore(directory, capacity_bytes, quotas, sync=False)
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


# ---- what survives


def test_blobs_outlive_the_store_with_everything_that_came_with_them(directory):
    layout = payload_of("layout", 4096)
    names = [BlobName("ü" * 100, b"\0" * 32), BlobName("", b"\xff" * 32), blob_name(1)]

    async def write(store: DiskStore) -> None:
        for number, name in enumerate(names):
            draft = await store.reserve(name, info_of(payload_of(number), layout))
            draft.buffer[:] = payload_of(number)
            await store.commit(draft)

    async def read(store: DiskStore) -> None:
        for number, name in enumerate(names):
            handle = await store.open(name)
            assert handle.info == info_of(payload_of(number), layout)
            assert bytes(handle.pieces[0]) == payload_of(number)
            assert handle.pieces[0].readonly
            handle.close()
        assert store.stats().blobs == len(names)

    play(directory, write)
    play(directory, read)


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
    """benchmarks.tier.crash is the same, 1000 times."""
    outcome = tier_crash.kill_often(tmp_path / "disk", kills=30, seed=1)
    assert outcome.failures == 0
    assert min(outcome.interrupted, outcome.leftover_files, outcome.blobs_that_must_be_there) > 0


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


def test_what_was_deleted_or_quarantined_stays_away_after_a_crash(directory):
    async def crash(store: DiskStore) -> None:
        await put_some(store)
        await store.delete(blob_name(0))
        await store.quarantine(blob_name(1))
        await put(store, blob_name(2), payload_of("new"))
        shutil.copytree(directory, directory.with_name("crashed"))

    async def read(store: DiskStore) -> None:
        assert await held(store, 0, 1, 2, 3) == [2, 3]
        assert await get(store, blob_name(2)) == payload_of("new")

    play(directory, crash)
    play(directory.with_name("crashed"), read)


def test_commits_that_wait_for_each_other_share_a_write(directory, monkeypatch):
    batches = []
    write = DiskMedium.write

    def counting(self, batch):
        batches.append(len(batch.payloads))
        return write(self, batch)

    monkeypatch.setattr(DiskMedium, "write", counting)

    async def scenario(store: DiskStore) -> None:
        drafts = [await reserve(store, blob_name(n), payload_of(n)) for n in range(50)]
        await asyncio.gather(*(store.commit(draft) for draft in drafts))
        assert len(await read_some(store, 50)) == 50

    play(directory, scenario)
    assert sum(batches) == 50
    assert len(batches) <= 4


def test_a_writer_that_gives_up_waiting_leaves_everything_in_order(directory):
    async def scenario(store: DiskStore) -> None:
        draft = await reserve(store, blob_name(0), payload_of(0))
        task = asyncio.create_task(store.commit(draft))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await put(store, blob_name(1), payload_of(1))
        assert await read_some(store) == [0, 1]

    play(directory, scenario)


def test_it_never_holds_more_bytes_on_disk_than_it_may(directory, monkeypatch):
    capacity, write = 20 * COST, DiskMedium.write

    def weighed(self, batch):
        failed = write(self, batch)
        sizes = [path.stat().st_blocks * 512 for path in payload_files(directory)]
        assert sum(sizes) + 4096 * len(sizes) <= capacity
        return failed

    monkeypatch.setattr(DiskMedium, "write", weighed)

    async def scenario(store: DiskStore) -> None:
        async def one(number: int) -> None:
            chance = random.Random(number)
            for _ in range(20):
                name = blob_name(chance.randrange(15))
                await put(store, name, payload_of(number, chance.randrange(1, 5 * SIZE)))
                await get(store, name)

        await asyncio.gather(one(1), one(2), one(3))
        assert store.stats().evictions > 0

    play(directory, scenario, capacity)


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


# ---- what is not whole


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


def foreign_index(index: Path) -> None:
    shutil.rmtree(index)
    with lmdb.open(str(index)) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"another", b"program's")


def newer_index(index: Path) -> None:
    with lmdb.open(str(index)) as environment, environment.begin(write=True) as transaction:
        transaction.put(disk_index.FORMAT_KEY, disk_index.FORMAT + b"1")


def nonsense_row(index: Path) -> None:
    with lmdb.open(str(index)) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"k" * 40, b"short")


def garbage(index: Path) -> None:
    (index / "data.mdb").write_bytes(os.urandom(50_000))


def cut_short(index: Path) -> None:
    os.truncate(index / "data.mdb", 3 * 4096)


def emptied(index: Path) -> None:
    os.truncate(index / "data.mdb", 0)


@pytest.mark.parametrize(
    "damage", [foreign_index, newer_index, nonsense_row, garbage, cut_short, emptied]
)
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


def test_a_payload_that_is_gone_or_cut_short_is_a_miss(directory):
    async def scenario(store: DiskStore) -> None:
        await put_some(store)
        missing, short, *_ = payload_files(directory)
        missing.unlink()
        os.truncate(short, 5)
        assert len(await read_some(store)) == 2
        assert (store.stats().quarantined, store.stats().blobs) == (2, 2)

    play(directory, scenario)


# ---- what a disk may do


def failing(call: Callable[..., Any], number: int, times: int = 1 << 30) -> Callable[..., Any]:
    """`call`, but for the first so many times the operating system says no."""
    left = [times]

    def fails(*arguments: Any, **keywords: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, os.strerror(number))
        return call(*arguments, **keywords)

    return fails


def test_a_sector_that_cannot_be_read_costs_one_blob(directory, monkeypatch):
    async def scenario(store: DiskStore) -> None:
        await put_some(store)
        with monkeypatch.context() as broken:
            broken.setattr("builtins.open", failing(open, errno.EIO))
            assert await store.open(blob_name(0)) is None
        assert await read_some(store) == [1, 2, 3]
        assert store.stats().quarantined == 1

    play(directory, scenario)


def test_no_more_open_files_is_not_the_fault_of_a_blob(directory, monkeypatch):
    async def scenario(store: DiskStore) -> None:
        await put_some(store)
        with monkeypatch.context() as broken:
            broken.setattr("builtins.open", failing(open, errno.EMFILE))
            with pytest.raises(TierUnavailableError, match=str(directory)):
                await store.open(blob_name(0))
        assert await read_some(store) == [0, 1, 2, 3]

    play(directory, scenario)


def test_a_full_disk_evicts_and_tries_again(directory, monkeypatch):
    async def scenario(store: DiskStore) -> None:
        await put_some(store)
        with monkeypatch.context() as full:
            full.setattr(os, "write", failing(os.write, errno.ENOSPC, times=1))
            await put(store, blob_name(4), payload_of(4))
        assert await read_some(store, 5) == [1, 2, 3, 4]
        assert store.stats().evictions == 1

    play(directory, scenario)


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


@pytest.mark.parametrize("free_blocks", [1, 3, 7])
def test_an_index_that_a_full_disk_has_no_room_for_is_no_damage(small_disk, free_blocks):
    """LMDB calls a write that ends early an I/O error."""
    neighbour = small_disk / "neighbour"
    info = info_of(payload_of(0))
    rows = {blob_name(n): disk_index.Row(f"{n:032x}", info, n) for n in range(400)}
    index = disk_index.DiskIndex(small_disk / "index", sync=False)
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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_stays_full_is_no_room_and_leaves_the_rest(directory, monkeypatch, number):
    async def scenario(store: DiskStore) -> None:
        await put_some(store, 8)
        with monkeypatch.context() as full:
            full.setattr(os, "write", failing(os.write, number))
            with pytest.raises(TierExhaustedError, match=f"{directory}: the disk is full"):
                await put(store, blob_name(8), payload_of(8))
        assert await read_some(store, 9) == [2, 3, 4, 5, 6, 7]
        # The draft's room is back: the whole capacity can be filled.
        await put(store, blob_name(9), payload_of(9, ROOM - 4 * 4096))

    play(directory, scenario)


@pytest.mark.parametrize(("call", "number"), [
    ("open", errno.EROFS), ("open", errno.EACCES), ("write", errno.EIO), ("fdatasync", errno.EIO),
])  # fmt: skip
def test_a_disk_that_cannot_be_written_is_unavailable_until_it_can(
    directory, monkeypatch, call, number
):
    async def scenario(store: DiskStore) -> None:
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

    async def run() -> None:
        store = DiskStore(directory, ROOM)
        await store.start()
        await scenario(store)
        await store.close()

    asyncio.run(run())


@pytest.mark.parametrize("error", [lmdb.DiskError, lmdb.PanicError, lmdb.CorruptedError])
def test_an_index_that_cannot_be_written_loses_nothing(directory, monkeypatch, error):
    async def scenario(store: DiskStore) -> None:
        await put_some(store)
        await store.delete(blob_name(0))
        with monkeypatch.context() as broken:
            broken.setattr(disk_index, "_encode", lambda row: raise_(error("no", errno.EIO)))
            with pytest.raises(TierUnavailableError, match=str(directory)):
                await put(store, blob_name(4), payload_of(4))
            with pytest.raises(TierUnavailableError, match=str(directory)):
                await put(store, blob_name(1), payload_of("new"))
        assert await read_some(store, 5) == [1, 2, 3]
        await put(store, blob_name(4), payload_of(4))

    play(directory, scenario)
    assert play(directory, read_some, ROOM) == [1, 2, 3]


def raise_(error: Exception) -> None:
    raise error


def test_a_quarantine_that_does_not_reach_the_disk_says_so_and_holds(directory, monkeypatch):
    async def scenario(store: DiskStore) -> None:
        await put_some(store)
        with monkeypatch.context() as broken:
            broken.setattr(Path, "unlink", failing(Path.unlink, errno.EROFS))
            with pytest.raises(TierUnavailableError, match=str(directory)):
                await store.quarantine(blob_name(0))
        assert await read_some(store) == [1, 2, 3]
        assert store.stats().quarantined == 1

    play(directory, scenario)
    assert play(directory, read_some) == [1, 2, 3]


def test_the_index_has_as_much_room_as_its_rows_need(directory, monkeypatch):
    monkeypatch.setattr(disk_index, "FIRST_MAP_BYTES", 10 * 4096)

    async def scenario(store: DiskStore) -> None:
        for number in range(100):
            name, layout = blob_name(number), payload_of(number, 3000)
            draft = await store.reserve(name, info_of(payload_of(number), layout))
            draft.buffer[:] = payload_of(number)
            await store.commit(draft)

    play(directory, scenario, 2 * ROOM)
    assert play(directory, read_100, 2 * ROOM) == 100


async def read_100(store: DiskStore) -> int:
    return len(await held(store, *range(100)))


def test_no_memory_for_a_draft_is_no_room(directory):
    async def scenario(store: DiskStore) -> None:
        await put_some(store)
        with pytest.raises(TierExhaustedError, match="no memory"):
            await store.reserve(blob_name(9), BlobInfo(1 << 62, b"", b"c" * 16))
        assert await read_some(store) == [0, 1, 2, 3]

    play(directory, scenario, 1 << 63)


@pytest.mark.parametrize(("name", "info", "argument"), [
    (BlobName("n" * 201, b"k" * 32), BlobInfo(1, b"", b"c" * 16), "namespace"),
    (BlobName("\ud800", b"k" * 32), BlobInfo(1, b"", b"c" * 16), "namespace"),
    (BlobName("n", b"k" * 31), BlobInfo(1, b"", b"c" * 16), "key"),
    (BlobName("n", b"k" * 32), BlobInfo(1, b"l" * 4097, b"c" * 16), "layout"),
    (BlobName("n", b"k" * 32), BlobInfo(1, b"", b"c" * 15), "checksum"),
])  # fmt: skip
def test_what_no_row_can_hold_is_refused_by_name(directory, name, info, argument):
    async def scenario(store: DiskStore) -> None:
        with pytest.raises(UsageError, match=f"^{argument}: expected"):
            await store.reserve(name, info)

    play(directory, scenario)


# ---- where it may be


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


def test_the_command_writes_what_it_saw(tmp_path):
    options = ["--kills", "2", "--out", str(tmp_path / "out.json"), "--seed", "3"]
    assert tier_crash.main(options) == 0
    assert '"corrupt": 0' in (tmp_path / "out.json").read_text()
    assert tier_crash.main(["--kills", "0"]) == 2
    assert isinstance(tier_crash.BENCHMARK.parse([]), Namespace)


def test_readers_that_go_before_the_payload_is_there_give_its_memory_back_when_it_is(tmp_path):
    """And the next one reads it anew; a budget that is used up is said, and not a miss."""
    payload, reading, go_on = payload_of(1), threading.Event(), threading.Event()

    async def play() -> None:
        budget = Budget(2 * len(payload))
        store = DiskStore(tmp_path, ROOM, sync=False, budget=budget)
        await store.start()
        for number in (1, 2):
            await put(store, blob_name(number), payload_of(number))
        real = store._medium.read

        def slow(row):
            reading.set()
            go_on.wait(20)
            return real(row)

        store._medium.read = slow
        gone = [asyncio.create_task(store.open(blob_name(1))) for _ in range(3)]
        await asyncio.to_thread(reading.wait, 20)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        assert budget.used_bytes == len(payload), "the thread still fills it"
        with pytest.raises(TierExhaustedError, match="--transfer-memory"):
            await store.open(blob_name(2))
        go_on.set()
        while budget.used_bytes:
            await asyncio.sleep(0.001)
        assert await get(store, blob_name(1)) == payload
        assert budget.used_bytes == 0
        assert store.check_integrity() == []
        await store.close()

    asyncio.run(play())

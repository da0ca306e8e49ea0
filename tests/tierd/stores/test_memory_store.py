"""The memory store, alone and in front of a disk, does what any store must do; the file that its
memory may be is its user's, and nothing is left of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from store_blobs import SIZE, blob_name, get, held, memory_store, payload_of, put, reserve
from store_contract import StoreContract

from kvtier.errors import TierExhaustedError, TierUnavailableError
from kvtier.tier.transport.shared_memory import SharedMemory
from kvtier.tier.wire import shared_digest
from kvtier_tierd.stores.arena import PAGE, Arena, pages, remove_leftovers
from kvtier_tierd.stores.layered import LayeredStore
from kvtier_tierd.stores.memory import MemoryStore

COST = pages(SIZE)


class TestMemoryStoreContract(StoreContract):
    @staticmethod
    def make_store(directory, capacity_bytes, quotas):
        return memory_store(capacity_bytes, quotas)


class TestLayeredStoreContractWhileNothingGetsToDisk(StoreContract):
    @staticmethod
    def make_store(directory, capacity_bytes, quotas):
        memory = memory_store(capacity_bytes, quotas)
        store = LayeredStore(memory, MemoryStore(capacity_bytes, quotas))
        store.behind_bytes = 0
        return store


async def test_beyond_the_high_watermark_the_oldest_go_until_the_low_one():
    store = memory_store(20 * COST, watermarks=(0.5, 0.9))
    await put(store, blob_name(0), payload_of(0))
    handle = await store.open(blob_name(0))
    for number in range(1, 18):
        await put(store, blob_name(number), payload_of(number))
    assert await held(store, *range(18)) == list(range(18))
    await put(store, blob_name(18), payload_of(18))
    assert await held(store, *range(19)) == [0, *range(10, 19)]
    handle.close()
    assert store.check_integrity() == []


async def test_making_room_in_one_piece_evicts_no_more_than_lies_there():
    """Even where the least recently used blobs are scattered all over."""
    store = memory_store(200 * COST)
    for number in range(200):
        await put(store, blob_name(number), payload_of(number))
    for number in sorted(range(200), key=lambda number: (number * 77) % 200):
        (await store.open(blob_name(number))).close()
    await put(store, blob_name(999), payload_of(999, 20 * COST))
    assert await get(store, blob_name(999)) == payload_of(999, 20 * COST)
    assert store.stats().blobs - 1 >= 200 - 2 * 20
    assert store.check_integrity() == []


async def test_where_pinned_blobs_leave_no_room_in_one_piece_it_is_exhausted():
    store = memory_store(3 * COST)
    for number in range(3):
        await put(store, blob_name(number), payload_of(number))
    handle = await store.open(blob_name(1))
    with pytest.raises(TierExhaustedError, match="in one piece"):
        await reserve(store, blob_name(9), payload_of(9, 2 * COST))
    handle.close()
    assert store.check_integrity() == []
    await put(store, blob_name(9), payload_of(9, 2 * COST))


# ---- the file that the memory may be, for clients on the same host


def test_the_file_is_for_its_user_only_and_its_pages_are_there_until_the_end(
    memory_directory, monkeypatch
):
    """Whoever looks at the memory then is not hurt."""
    monkeypatch.chdir(memory_directory)
    arena = Arena(16 * PAGE, Path())
    monkeypatch.chdir("/")
    found = arena.path.stat()
    assert arena.path.is_absolute()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size == arena.size <= found.st_blocks * 512
    client = SharedMemory.open(str(arena.path), arena.size, shared_digest(arena.token))
    offset = arena.allocate(PAGE)
    mine, theirs = arena.view(offset, PAGE), client.view(offset, PAGE)
    theirs[:3] = b"abc"
    assert bytes(mine[:3]) == b"abc"
    with arena.path.open("rb") as file:
        arena.close()
        assert os.fstat(file.fileno()).st_blocks == 0, "its pages have been given back"
    assert bytes(mine[:3]) == bytes(theirs[:3]) == bytes(3)
    theirs[:3] = b"abc"
    assert list(memory_directory.iterdir()) == []


def test_memory_that_is_not_to_be_had_is_refused_and_nothing_is_left_behind(
    memory_directory, monkeypatch
):
    def full(*_):
        raise OSError(28, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TierExhaustedError, match="--memory"):
        Arena(1 << 50, memory_directory)
    with pytest.raises(TierExhaustedError):
        Arena(1 << 60)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierUnavailableError, match=r"--shared-memory.*No space left"):
        Arena(PAGE, memory_directory)
    assert list(memory_directory.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_file_of_a_killed_server_is_removed_and_that_of_a_living_one_is_not(memory_directory):
    living = Arena(16 * PAGE, memory_directory)
    dead = memory_directory / "kvtier-tier-1-dead"
    dead.write_bytes(bytes(16 * PAGE))
    (memory_directory / "kvtier-tier-2-empty").touch()
    (memory_directory / "other").write_text("not ours")
    with dead.open("rb") as file:
        remove_leftovers(memory_directory)
        assert os.fstat(file.fileno()).st_blocks == 0, "though a process has it open"
    assert {path.name for path in memory_directory.iterdir()} == {living.path.name, "other"}
    living.close()


def test_a_file_taken_for_a_leftover_before_it_was_locked_is_made_again(
    memory_directory, monkeypatch
):
    real_open, opened = os.open, []

    def open_and_lose(path, flags, *rest):
        fd = real_open(path, flags, *rest)
        if flags & os.O_EXCL:
            opened.append(fd)
            if len(opened) == 1:
                os.unlink(path)
        return fd

    monkeypatch.setattr(os, "open", open_and_lose)
    arena = Arena(PAGE, memory_directory)
    assert len(opened) == 2
    assert arena.path.exists()
    arena.close()

"""The memory that blobs live in, and the file that it may be for clients on the same host."""

from __future__ import annotations

import itertools
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import TierExhaustedError, TierUnavailableError
from kvtier.tier.transport.shared_memory import SharedMemory
from kvtier_tierd.stores.arena import PAGE, Arena, pages, remove_leftovers


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6 * PAGE)), max_size=60))
def test_extents_never_overlap_and_everything_comes_back(steps):
    arena = Arena(32 * PAGE)
    extents: list[tuple[int, int]] = []
    for allocating, number in steps:
        if allocating:
            offset = arena.allocate(number)
            if offset is not None:
                assert PAGE <= offset <= arena.size - number
                extents.append((offset, pages(number)))
        elif extents:
            arena.free(extents.pop(number % len(extents))[0])
        taken = sorted(extents)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(taken))
        assert arena.check_integrity() == []
    for offset, _ in extents:
        arena.free(offset)
    assert arena.allocate(32 * PAGE) == PAGE
    arena.close()


def test_the_shared_file_is_for_its_user_only_and_all_there(memory_directory):
    arena = Arena(64 * PAGE, memory_directory)
    found = arena.path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size == arena.size <= found.st_blocks * 512
    arena.close()
    assert list(memory_directory.iterdir()) == []


def test_its_name_means_the_same_wherever_a_client_is(memory_directory, monkeypatch):
    monkeypatch.chdir(memory_directory)
    arena = Arena(PAGE, Path())
    assert arena.path.is_absolute()
    monkeypatch.chdir("/")
    assert SharedMemory.open(str(arena.path), arena.size, arena.token) is not None
    arena.close()


def test_more_memory_than_there_is_is_refused_at_the_start(memory_directory):
    with pytest.raises(TierExhaustedError, match="--memory"):
        Arena(1 << 50, memory_directory)
    with pytest.raises(TierExhaustedError):
        Arena(1 << 60)
    with pytest.raises(TierUnavailableError, match="--shared-memory"):
        Arena(PAGE, memory_directory / "missing")
    assert list(memory_directory.iterdir()) == []


def test_a_file_that_cannot_be_filled_leaves_nothing_behind(memory_directory, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierUnavailableError, match="No space left"):
        Arena(PAGE, memory_directory)
    assert list(memory_directory.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_while_others_look_at_the_memory_hurts_none_of_them(memory_directory):
    arena = Arena(16 * PAGE, memory_directory)
    client = SharedMemory.open(str(arena.path), arena.size, arena.token)
    offset = arena.allocate(PAGE)
    mine, theirs = arena.view(offset, PAGE), client.view(offset, PAGE)
    theirs[:3] = b"abc"
    assert bytes(mine[:3]) == b"abc"
    with arena.path.open("rb") as file:
        arena.close()
        assert os.fstat(file.fileno()).st_blocks == 0, "its pages have been given back"
    assert bytes(mine[:3]) == bytes(theirs[:3]) == bytes(3)
    theirs[:3] = b"abc"


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

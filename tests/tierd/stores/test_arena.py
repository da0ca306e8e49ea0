"""The file that a store's memory may be, for clients on the same host: whose it is, and what is
left of it. That extents never overlap is part of the contract of a memory store."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvtier.errors import TierExhaustedError, TierUnavailableError
from kvtier.tier.transport.shared_memory import SharedMemory
from kvtier_tierd.stores.arena import PAGE, Arena, remove_leftovers


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

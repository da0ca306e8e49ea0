"""The memories that ranks serve: those that the first one finds and all can read, or none."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as processes

from kvtier.errors import MemoryFileError, MemoryMismatchError, StoreUnavailableError
from kvtier.memory.published import Place
from kvtier_sglang.memory import source as reading
from kvtier_sglang.memory.source import MemorySource
from kvtier_sglang.ranks import Ranks

TOOLS = Place(Path("/srv/tools"), "ab" * 32, 1001, "tools")
FORMATS = Place(Path("/srv/formats"), "cd" * 32, 500, "formats")


class Finder:
    """Finds what it is told, or fails so."""

    def __init__(self, *finds: list[Place] | Exception) -> None:
        self.finds = list(finds)

    def find(self) -> list[Place]:
        found = self.finds.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


class Disk:
    """The memories that `Place.read` finds on this rank's disk, by name."""

    def __init__(self, **held: Any) -> None:
        self.held = held

    def read(self, place: Place) -> Any:
        found = self.held[place.name]
        if isinstance(found, Exception):
            raise found
        return found


def memory(digest: str, *prefix: int) -> SimpleNamespace:
    return SimpleNamespace(digest=digest[:16], prefix_ids=prefix)


def serve(_: Any) -> None:
    """The check of a model that every memory is for."""


AWAY = StoreUnavailableError("calibration store: gone")


@pytest.fixture
def disk(monkeypatch) -> Disk:
    held = Disk(tools=memory(TOOLS.digest, 1, 2), formats=memory(FORMATS.digest, 3))
    monkeypatch.setattr(Place, "read", lambda place: held.read(place))
    return held


def test_a_store_that_is_away_at_the_start_is_no_error_and_later_one(caplog):
    source = MemorySource(Finder(AWAY, AWAY, [TOOLS]), Ranks())
    assert source.at_start == []
    assert source.bytes_at_start == 0
    assert "no prefix memory is served until they are read again" in caplog.text
    assert "gone" in caplog.text
    with pytest.raises(StoreUnavailableError):
        source.now()
    assert source.now() == [TOOLS]


def test_a_store_that_has_nothing_says_so(caplog):
    assert MemorySource(Finder([]), Ranks()).at_start == []
    assert "no prefix memory is published for this model" in caplog.text


def test_a_damaged_directory_at_the_start_is_an_error():
    with pytest.raises(MemoryFileError):
        MemorySource(Finder(MemoryFileError("no card")), Ranks())


def test_memories_at_the_start_are_paid_for_by_all_ranks_together():
    source = MemorySource(Finder([TOOLS, FORMATS]), Ranks())
    assert source.bytes_at_start == 1501
    source.ranks.size = 2
    assert source.bytes_at_start == 750


def test_a_memory_that_cannot_be_served_is_named(disk):
    source = MemorySource(Finder([]), Ranks())
    assert list(source.read([TOOLS, FORMATS], serve)) == [TOOLS.digest[:16], FORMATS.digest[:16]]

    def refuse(found: Any) -> None:
        if found.prefix_ids == (3,):
            raise MemoryMismatchError("made for dtype bfloat16")

    with pytest.raises(MemoryMismatchError, match=r"'formats' in /srv/formats: made for dtype"):
        source.read([TOOLS, FORMATS], refuse)
    disk.held["tools"] = memory("ef" * 32, 3)
    with pytest.raises(MemoryFileError, match=r"'formats' .*another one has the same prefix"):
        source.read([TOOLS, FORMATS], serve)


@dataclass
class Group:
    """The part of SGLang's GroupCoordinator that is used."""

    rank_in_group: int
    world_size: int = 2
    ranks: tuple[int, ...] = (0, 1)
    cpu_group: Any = None


def one_rank(rank: int, folder: str) -> None:
    meeting = f"file://{folder}/meeting"
    # Ranks that part would otherwise wait for each other for half an hour.
    soon = timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=soon)
    ranks = Ranks(Group(rank))
    healthy = {"tools": memory(TOOLS.digest, 1, 2), "formats": memory(FORMATS.digest, 3)}
    damaged = healthy | {"tools": MemoryFileError("torn")}
    # Redis answers the first rank only, then the second one only.
    finds = {0: ([TOOLS], [TOOLS, FORMATS], AWAY), 1: (AWAY, AWAY, [FORMATS])}[rank]
    reading.Place.read = lambda place: Disk(**healthy).read(place)
    source = MemorySource(Finder(*finds), ranks)
    told: list[Any] = [list(source.read(source.at_start, serve)), source.bytes_at_start]
    told.append(list(source.read(source.now(), serve)))
    for call in (
        source.now,
        lambda: in_disk(Disk(**(damaged if rank == 1 else healthy)), source),
        lambda: in_disk(Disk(**(damaged if rank == 0 else healthy)), source),
    ):
        try:
            call()
        except (StoreUnavailableError, MemoryFileError) as error:
            told.append(str(error))
    Path(folder, f"{rank}").write_text(repr(told))
    dist.destroy_process_group()


def in_disk(disk: Disk, source: MemorySource) -> None:
    reading.Place.read = lambda place: disk.read(place)
    source.read([TOOLS, FORMATS], serve)


def test_ranks_serve_the_same_whichever_of_them_redis_answers(tmp_path):
    """None of them serves what one cannot read."""
    processes.spawn(one_rank, (str(tmp_path),), nprocs=2)
    first, second = ((tmp_path / f"{rank}").read_text() for rank in (0, 1))
    assert first == second
    both = [TOOLS.digest[:16], FORMATS.digest[:16]]
    torn = "prefix memory 'tools' in /srv/tools: torn"
    assert eval(first) == [both[:1], 500, both, str(AWAY), torn, torn]

"""The memories that ranks serve: those that the first one finds and all can read, or none. That
ranks tell each other is in test_serving_published_memories.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import MemoryFileError, MemoryMismatchError, StoreUnavailableError
from kvtier.memory.published import Place
from kvtier_sglang.memory.source import MemorySource
from kvtier_sglang.ranks import Ranks

TOOLS = Place(Path("/srv/tools"), "ab" * 32, 1001, "tools")
FORMATS = Place(Path("/srv/formats"), "cd" * 32, 500, "formats")
PLACES = [TOOLS, FORMATS]


class Away:
    """A store that is away."""

    def find(self) -> list[Place]:
        raise StoreUnavailableError("calibration store: gone")


def memory(digest: str, *prefix: int) -> SimpleNamespace:
    return SimpleNamespace(digest=digest[:16], prefix_ids=prefix)


def serve(_: Any) -> None:
    """The check of a model that every memory is for."""


@pytest.fixture
def held(monkeypatch) -> dict[str, Any]:
    """The memories on this rank's disk, by name."""
    found = {"tools": memory(TOOLS.digest, 1, 2), "formats": memory(FORMATS.digest, 3)}
    monkeypatch.setattr(Place, "read", lambda place: found[place.name])
    return found


def test_a_memory_that_cannot_be_served_is_named(held):
    source = MemorySource(Away(), Ranks())
    assert list(source.read(PLACES, serve)) == [TOOLS.digest[:16], FORMATS.digest[:16]]

    def refuse(found: Any) -> None:
        if found.prefix_ids == (3,):
            raise MemoryMismatchError("made for dtype bfloat16")

    with pytest.raises(MemoryMismatchError, match=r"'formats' in /srv/formats: made for dtype"):
        source.read(PLACES, refuse)
    held["tools"] = memory("ef" * 32, 3)
    with pytest.raises(MemoryFileError, match=r"'formats' .*another one has the same prefix"):
        source.read(PLACES, serve)


def test_ranks_serve_what_the_first_one_finds_and_nothing_that_one_cannot_read(held):
    """The store answers the first rank only, and then the second rank's disk is damaged."""

    class Second(Ranks):
        failure: MemoryFileError | None = None

        def first(self, ask: Any) -> Any:
            return PLACES

        def every(self, told: Any) -> list[Any]:
            return [told, self.failure]

    ranks = Second(SimpleNamespace(world_size=2, rank_in_group=1))
    source = MemorySource(Away(), ranks)
    assert source.bytes_at_start == 750
    for places in (source.at_start, source.now()):
        assert list(source.read(places, serve)) == [TOOLS.digest[:16], FORMATS.digest[:16]]
    ranks.failure = MemoryFileError("prefix memory 'tools' in /srv/tools: torn")
    with pytest.raises(MemoryFileError, match="torn"):
        source.read(PLACES, serve)

"""The prefix memories that a server is to serve, the same on every tensor parallel rank.

    first rank:  folder or calibration store ──> places ──┐ told to all
    every rank:  reads its part of the files <────────────┘ ──> all could: serve them; else: none

Only the first rank asks, because a store may answer one rank and not another. Each rank must find
the very memories that the first one was told of, by their digests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvtier.errors import KvtierError, MemoryFileError, StoreError
from kvtier.memory.published import MemoryFinder, Place
from kvtier.memory.storage import PrefixMemory
from kvtier_sglang.ranks import Ranks

logger = logging.getLogger(__name__)

Check = Callable[[PrefixMemory], None]


class MemorySource:
    """Every call waits for all ranks: see kvtier_sglang.ranks for where it may stand.

    at_start: where the memories were when this was made; none where the store was away. Raises
              MemoryFileError and CalibrationDocumentError.
    """

    def __init__(self, finder: MemoryFinder, ranks: Ranks) -> None:
        self.ranks = ranks
        self._finder = finder
        self.at_start: Sequence[Place] = ranks.first(self._find_or_none)

    @property
    def bytes_at_start(self) -> int:
        """The bytes of the tensors that each rank holds."""
        return sum(place.num_bytes for place in self.at_start) // self.ranks.size

    def _find_or_none(self) -> list[Place]:
        try:
            found = self._finder.find()
        except StoreError as error:
            logger.warning("no prefix memory is served until they are read again: %s", error)
            return []
        if not found:
            logger.warning("no prefix memory is published for this model")
        return found

    def now(self) -> Sequence[Place]:
        """Return where the memories are now. Raises MemoryFileError, CalibrationDocumentError and
        StoreError."""
        return self.ranks.first(self._finder.find)

    def read(self, places: Sequence[Place], check: Check) -> dict[str, PrefixMemory]:
        """The memories at places that all ranks were told of, by digest. check: raises
        MemoryFileError for one that must not be served.

        Raises what the first of the ranks found wrong, on all of them.
        """
        found: dict[str, PrefixMemory] = {}
        failure: KvtierError | None = None
        try:
            for place in places:
                memory = _read(place, check)
                if any(other.prefix_ids == memory.prefix_ids for other in found.values()):
                    why = "another one has the same prefix"
                    raise MemoryFileError(f"prefix memory {place}: {why}")
                found[memory.digest] = memory
        except KvtierError as error:
            failure = error
        for one in self.ranks.every(failure):
            if one is not None:
                raise one
        return found


def _read(place: Place, check: Check) -> PrefixMemory:
    try:
        memory = place.read()
        check(memory)
    except MemoryFileError as error:
        raise type(error)(f"prefix memory {place}: {error}") from error
    return memory

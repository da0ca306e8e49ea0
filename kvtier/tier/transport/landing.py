"""The landing of blobs: in buffers that the caller names, and checked there.

The service sends a header first; the caller says where a blob of that size and meaning may go, or
that it does not want it. Whatever is not exactly what was stored is CORRUPT, and what is in its
buffer then is nothing to look at.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from kvtier.errors import UsageError
from kvtier.tier.blobs.payload import Digest
from kvtier.tier.transport.shared_memory import copy
from kvtier.v1 import tier_pb2 as pb

# A chunk is copied in blocks so small that the checksum finds them in the core's own cache.
BLOCK_BYTES = 256 << 10


class Landing(Enum):
    """The fate of a blob that was asked for."""

    LANDED = "landed"
    MISSING = "missing"
    CORRUPT = "corrupt"
    DECLINED = "declined"


class Offer(NamedTuple):
    """A blob about to land, as its header describes it. position: in the keys asked for."""

    position: int
    num_bytes: int
    layout: bytes


# This says where an offer shall land: a writable buffer of exactly its size, or None to decline it.
Land = Callable[[Offer], memoryview | None]


class Arriving:
    """A blob on its way in: where it lands and what it digests to.

    Raises UsageError where `land` names a buffer of another size.
    """

    def __init__(self, position: int, header: pb.BlobHeader, namespace: str, land: Land) -> None:
        self.position = position
        buffer = land(Offer(position, header.num_bytes, header.layout))
        self._buffer = None if buffer is None else memoryview(buffer).cast("B")
        if self._buffer is not None and len(self._buffer) != header.num_bytes:
            expected = f"a buffer of {header.num_bytes} bytes"
            raise UsageError("land", expected, len(self._buffer))
        self._digest = Digest(header.key, namespace, header.layout)
        self._checksum = header.checksum
        self._landed = 0

    def add(self, chunk: memoryview) -> None:
        if self._buffer is None:
            return
        end = self._landed + len(chunk)
        if end <= len(self._buffer):
            for begin in range(0, len(chunk), BLOCK_BYTES):
                block = chunk[begin : begin + BLOCK_BYTES]
                landed = self._buffer[self._landed + begin :][: len(block)]
                landed[:] = block
                self._digest.update(landed)
        self._landed = end

    def copy(self, source: memoryview, until: float) -> None:
        """All of it at once, from memory that is the service's until `until` (time.monotonic).

        Raises TierUnavailableError where that takes longer.
        """
        if self._buffer is not None:
            copy([source], self._buffer, self._digest, until)
        self._landed = len(source)

    def finish(self) -> Landing:
        if self._buffer is None:
            return Landing.DECLINED
        whole = self._landed == len(self._buffer)
        fine = whole and self._digest.value() == self._checksum
        return Landing.LANDED if fine else Landing.CORRUPT

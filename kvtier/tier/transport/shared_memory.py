"""Memory of a tier service on this host, mapped; and copies that let other threads run."""

from __future__ import annotations

import mmap
import os
import stat
import time
from collections.abc import Sequence
from pathlib import PurePath

import numpy as np

from kvtier.errors import TierProtocolError, TierUnavailableError
from kvtier.tier.blobs.payload import Bytes, Digest
from kvtier.tier.wire import SHARED_FILE_PREFIX, SHARED_TOKEN_BYTES, shared_digest

# Small enough to be in the cache still when the checksum reads it again, and large enough that
# taking Python's lock back after each block costs little beside a busy thread.
BLOCK_BYTES = 2 << 20


class SharedMemory:
    """The service's arena, mapped whole. token: what it begins with; saying it proves to the
    service that this client reads its memory.

    It is never closed: a thread that copies holds on to it, and the last one to let go unmaps it.
    """

    def __init__(self, mapped: mmap.mmap, token: bytes) -> None:
        self.token = token
        self._memory = memoryview(mapped)

    @classmethod
    def open(cls, path: str, num_bytes: int, digest: bytes) -> SharedMemory | None:
        """Map the file at `path`, or None where it is not to be had or another service's.

        digest: of the token (kvtier.tier.wire.shared_digest).
        A service may name any path, so only a file that can be a service's memory is looked at.
        """
        if not PurePath(path).name.startswith(SHARED_FILE_PREFIX):
            return None
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (OSError, ValueError):
            # Another host or container, or another user: the stream will do.
            return None
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
                return None
            mapped = mmap.mmap(file, num_bytes)
        except (OSError, ValueError):
            return None
        finally:
            os.close(file)
        token = mapped[:SHARED_TOKEN_BYTES]
        whole = len(token) == SHARED_TOKEN_BYTES
        return cls(mapped, token) if whole and shared_digest(token) == digest else None

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Raises TierProtocolError for an extent outside of the memory."""
        if not SHARED_TOKEN_BYTES <= offset <= offset + num_bytes <= len(self._memory):
            raise TierProtocolError(f"an extent at {offset} outside of the shared memory")
        return self._memory[offset : offset + num_bytes]


def copy(
    pieces: Sequence[Bytes],
    into: memoryview,
    digest: Digest | None = None,
    until: float = float("inf"),
) -> None:
    """Copy pieces that follow each other into a buffer of exactly their size.

    digest: fed with what landed, block by block while the cache still has it. Both steps let go
            of Python's lock.
    until:  time.monotonic() from which on the memory may be another blob's.

    Raises TierUnavailableError where it takes longer than `until`.
    """
    target = np.frombuffer(into, dtype=np.uint8)
    position = 0
    for piece in pieces:
        source = np.frombuffer(memoryview(piece).cast("B"), dtype=np.uint8)
        for begin in range(0, len(source), BLOCK_BYTES):
            if time.monotonic() >= until:
                raise TierUnavailableError("copying took longer than the lease")
            block = source[begin : begin + BLOCK_BYTES]
            landed = target[position : position + len(block)]
            # An elementwise copy: what memcpy does on x86 halves in speed where source and target
            # lie a few bytes apart modulo a page, as an arena's and an array's memory do.
            np.positive(block, out=landed)
            if digest is not None:
                digest.update(into[position : position + len(block)])
            position += len(block)

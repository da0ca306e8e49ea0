"""One large stretch of memory and who owns which part of it.

    offset    0        PAGE                                              size
              [ token ][ blob ][ blob ][   free   ][ blob ][    free    ]

Extents begin and end at page boundaries; freed neighbours join. The memory may be a file that
clients on the same host map: then every process that may open it (this user's) may read and write
every namespace's bytes, which is why payloads carry checksums.

The file's pages are all there from the start: touching one that the file system has no room for
is a SIGBUS, and it would be the engine that dies of it. When the service ends, or the next one
finds what a killed one left, the pages go back at once, because clients may keep the file mapped
for as long as they like.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
from bisect import bisect_left, insort
from collections.abc import Callable
from pathlib import Path

from kvtier.errors import TierExhaustedError, TierUnavailableError
from kvtier.tier.wire import SHARED_FILE_PREFIX, SHARED_TOKEN_BYTES
from kvtier_tierd.stores.base import SharedFile

PAGE = 4096

logger = logging.getLogger(__name__)


def pages(num_bytes: int) -> int:
    """Bytes rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


class Arena:
    """Memory of `capacity_bytes` (whole pages) handed out in extents, first fit.

    directory: where the file that clients map is made; None keeps the memory private.
    Not thread-safe; the memory itself may be touched from anywhere.

    Raises TierExhaustedError where there is not as much memory, TierUnavailableError where there
    can be no file in `directory`.
    """

    def __init__(self, capacity_bytes: int, directory: Path | None = None) -> None:
        self.capacity_bytes = pages(capacity_bytes)
        self.size = PAGE + self.capacity_bytes
        self.token = secrets.token_bytes(SHARED_TOKEN_BYTES)
        self.path: Path | None = None
        self._file: int | None = None
        self._map = self._private() if directory is None else self._shared(directory)
        self._map[:SHARED_TOKEN_BYTES] = self.token
        self.memory = memoryview(self._map)
        self._free: list[tuple[int, int]] = [(PAGE, self.capacity_bytes)]
        self._held: dict[int, int] = {}

    @property
    def shared(self) -> SharedFile | None:
        """The file that clients map; None where the memory is private."""
        return None if self.path is None else SharedFile(str(self.path), self.size, self.token)

    def _private(self) -> mmap.mmap:
        try:
            return mmap.mmap(-1, self.size)
        except (OSError, OverflowError) as error:
            raise TierExhaustedError(f"no memory of {self.size} bytes: {error}") from error

    def _shared(self, directory: Path) -> mmap.mmap:
        try:
            remove_leftovers(directory)
            room = os.statvfs(directory)
            if room.f_bavail * room.f_frsize < self.size:
                raise TierExhaustedError(
                    f"{directory}: {self.size} bytes wanted, {room.f_bavail * room.f_frsize} free; "
                    "ask for less (--memory), give it more, or serve without (--shared-memory off)"
                )
            self.path, self._file = _locked_file(directory)
            try:
                os.posix_fallocate(self._file, 0, self.size)
                return mmap.mmap(self._file, self.size)
            except BaseException:
                self._remove_file()
                raise
        except OSError as error:
            raise TierUnavailableError(f"--shared-memory {directory}: {error}") from error

    def _remove_file(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def allocate(self, num_bytes: int) -> int | None:
        """The offset of a new extent, or None where no free stretch is long enough."""
        need = pages(num_bytes)
        for index, (offset, size) in enumerate(self._free):
            if size >= need:
                if size == need:
                    del self._free[index]
                else:
                    self._free[index] = (offset + need, size - need)
                self._held[offset] = need
                return offset
        return None

    def free(self, offset: int) -> None:
        """Give an extent back."""
        size = self._held.pop(offset)
        at = bisect_left(self._free, (offset, 0))
        if at < len(self._free) and self._free[at][0] == offset + size:
            size += self._free.pop(at)[1]
        if at > 0 and sum(self._free[at - 1]) == offset:
            offset, before = self._free.pop(at - 1)
            size += before
        insort(self._free, (offset, size))

    def stretch(
        self, offset: int, num_bytes: int, movable: Callable[[int], bool]
    ) -> list[int] | None:
        """Extents that, once freed, leave `num_bytes` in one piece around the one at `offset`.

        movable: whether an extent may go. None where one may not that has to.
        """
        need, extents = pages(num_bytes) - self._free_before(offset), []
        while need > 0:
            if offset in self._held:
                if not movable(offset):
                    return None
                extents.append(offset)
                size = self._held[offset]
            else:
                size = self._free_at(offset)
            if size == 0:
                return None
            need, offset = need - size, offset + size
        return extents

    def _free_before(self, offset: int) -> int:
        """Bytes of the free extent that ends here."""
        at = bisect_left(self._free, (offset, 0)) - 1
        return self._free[at][1] if at >= 0 and sum(self._free[at]) == offset else 0

    def _free_at(self, offset: int) -> int:
        """Bytes of the free extent that begins here."""
        at = bisect_left(self._free, (offset, 0))
        return self._free[at][1] if at < len(self._free) and self._free[at][0] == offset else 0

    def view(self, offset: int, num_bytes: int) -> memoryview:
        return self.memory[offset : offset + num_bytes]

    def close(self) -> None:
        """Drop the memory and the file. Views that others still hold stay valid, and read zeros."""
        if self._file is not None:
            _give_pages_back(self._map)
        self._remove_file()
        self.memory.release()
        with contextlib.suppress(BufferError):
            self._map.close()

    def check_integrity(self) -> list[str]:
        """Violations: extents that overlap, bytes of no extent, neighbours not joined."""
        problems = []
        position = PAGE
        last_free = False
        parts = [(offset, size, True) for offset, size in self._free]
        parts += [(offset, size, False) for offset, size in self._held.items()]
        for offset, size, free in sorted(parts):
            if offset != position:
                problems.append(f"extent at {offset} does not continue at {position}")
            if free and last_free:
                problems.append(f"free extents at {offset} are not joined")
            position, last_free = offset + size, free
        if position != self.size:
            problems.append(f"extents end at {position} of {self.size}")
        return problems


def _locked_file(directory: Path) -> tuple[Path, int]:
    """A new file, locked while its server lives, so that the next one can tell leftovers."""
    # Absolute, because clients are told, and they are somewhere else.
    path = directory.resolve() / f"{SHARED_FILE_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return path, file
        # Another server took it for a leftover before it was locked.
        os.close(file)


def remove_leftovers(directory: Path) -> None:
    """Delete the memory files of servers that were killed: those that no process has locked."""
    for path in directory.glob(SHARED_FILE_PREFIX + "*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            logger.info("removed %s, left by a service that was killed", path)
            with mmap.mmap(file, 0) as mapped:
                _give_pages_back(mapped)
        except (OSError, ValueError):
            # Locked by its server, another user's, or empty.
            pass
        finally:
            os.close(file)


def _give_pages_back(mapped: mmap.mmap) -> None:
    """Punch out a file's pages: unlinking it frees nothing that a client has mapped."""
    with contextlib.suppress(OSError):  # not every file system can
        mapped.madvise(mmap.MADV_REMOVE)

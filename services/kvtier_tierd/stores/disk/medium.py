"""The files of the disk store, and the calls that block: an index, and a file per payload.

    DIRECTORY/
        lock              flock: exclusive, held by the service that uses the directory
        index/data.mdb    LMDB, a row per blob: index.py
        payload/ID.kv     a blob's payload; written once, never changed, no ID is used twice
        damaged-TIME/     an index that made no sense, for an operator to find out why; the latest

A write goes in this order, so that no reader finds half a blob, wherever the process is killed:

    1  unlink what was evicted or deleted     killed here: rows without a file, dropped at start
    2  write new payload files, sync them     killed here: files without a row, unlinked at start
    3  one index transaction, synced          all of it or nothing
       then the writer is answered; the file of what was replaced goes with the next write

Payloads are not in the index because LMDB reads through a memory map: there, a sector that cannot
be read is a SIGBUS that ends the service; here it is an error that costs one blob. A file's room
also goes back to the file system at once, and the index stays small enough to be checked entirely
at every start.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import lmdb
import numpy as np

from kvtier.errors import TierError, TierExhaustedError, TierUnavailableError
from kvtier_tierd.stores.base import BlobInfo, BlobName, Buffer
from kvtier_tierd.stores.disk.index import UNREADABLE, DiskIndex, Row

BLOCK_BYTES = 4096
ROW_BYTES = 1024  # inode, directory entry and index row with a short layout, generously
PAYLOAD_FILE = re.compile(r"([0-9a-f]{32})\.kv")
FULL = {errno.ENOSPC, errno.EDQUOT}

logger = logging.getLogger(__name__)


class Payload(NamedTuple):
    """A blob to be written."""

    name: BlobName
    row: Row
    buffer: Buffer


def cost(info: BlobInfo) -> int:
    """Bytes of the budget that a blob takes: whole blocks, and what is kept beside the payload."""
    return _blocks(info.num_bytes) + _blocks(ROW_BYTES + 2 * len(info.layout))


class DiskMedium:
    """The directory of one store. Every method blocks.

    `read` may be called from any thread, the others by one at a time. What the operating system or
    LMDB raises comes out as TierExhaustedError where the disk is full and as TierUnavailableError
    otherwise, naming the directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._payloads = directory / "payload"
        self._index = DiskIndex(directory / "index")
        self._lock: int | None = None

    def open(self) -> dict[BlobName, Row]:
        """Lock the directory and return the blobs that are whole, least recently used first.

        Looks at the index and at the sizes of files, never into a payload. What is left of blobs
        that are not whole is removed.
        """
        directories = (self.directory, self._index.directory, self._payloads)
        try:
            with self._errors():
                for path in directories:
                    path.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._take_lock()
                rows = self._whole(self._index.open())
                for path in directories:
                    _sync_directory(path)
        except BaseException:
            self.close()
            raise
        return dict(sorted(rows.items(), key=lambda item: item[1].used))

    def write(
        self,
        payloads: Sequence[Payload],
        rows: dict[BlobName, Row | None],
        doomed: Sequence[str],
    ) -> dict[str, TierError]:
        """Bring blobs to disk; returns, by file, which payloads failed and why.

        payloads: new blobs; of two with the same name the later one stays.
        rows:     what the index shall say of other names; None: nothing. Those of the payloads that
                  are kept are added before the index is written.
        doomed:   files that no row refers to once this is written.

        Raises TierError where no payload was kept, and the rows have to be written again because
        the index may say anything of them.
        """
        with self._errors():
            if self._lock is None:
                raise TierUnavailableError(f"{self.directory}: not open")
            for file in doomed:
                self._path(file).unlink(missing_ok=True)
            try:
                failed = self._write_payloads(payloads)
                kept = [one for one in payloads if one.row.file not in failed]
                rows.update({one.name: one.row for one in kept})
                self._index.write(rows)
            except BaseException:
                self._discard(one.row.file for one in payloads)
                raise
        return failed

    def read(self, row: Row) -> Buffer | None:
        """A payload, read-only; None where its file is gone, cut short or cannot be read."""
        payload = np.empty(row.info.num_bytes, np.uint8).data
        path, done = self._path(row.file), 0
        try:
            with open(path, "rb", buffering=0) as file:
                while done < len(payload) and (count := file.readinto(payload[done:])):
                    done += count
        except OSError as error:
            if error.errno not in UNREADABLE | {errno.ENOENT}:
                raise TierUnavailableError(f"{self.directory}: {error}") from error
            logger.warning("a payload is lost: %s", error)
            return None
        if done < len(payload):
            logger.warning("a payload is lost: %s ends after %d bytes", path, done)
            return None
        return payload.toreadonly()

    def close(self) -> None:
        """Sync the index and let go of the directory. May be called in any state."""
        with self._errors():
            try:
                self._index.close()
            finally:
                if self._lock is not None:
                    os.close(self._lock)
                    self._lock = None

    def check(
        self, rows: Mapping[BlobName, Row], files: set[str], unknown: set[BlobName]
    ) -> list[str]:
        """Return the differences between the disk and what should be there; empty when there are
        none.

        files:   all there may be. unknown: names whose rows may say anything. Uses may differ, too.
        """
        found = {name: row[:2] for name, row in self._index.rows().items()}
        wanted = {name: row[:2] for name, row in rows.items()}
        problems = [f"the index is wrong about {name}" for name in {*found, *wanted} - unknown
                    if found.get(name) != wanted.get(name)]  # fmt: skip
        sizes = self._sizes()
        problems += [f"payload {file} is no blob's" for file in sizes.keys() - files]
        problems += [f"payload {row.file} is incomplete" for row in rows.values()
                     if sizes.get(row.file) != row.info.num_bytes]  # fmt: skip
        return problems

    def _take_lock(self) -> None:
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            message = f"{self.directory}: another service is using this directory"
            raise TierUnavailableError(message) from error
        self._lock = lock

    def _whole(self, rows: dict[BlobName, Row]) -> dict[BlobName, Row]:
        """Return the rows whose payloads are there, and drop the other rows and files."""
        sizes = self._sizes()
        whole = {name: row for name, row in rows.items()
                 if sizes.get(row.file) == row.info.num_bytes}  # fmt: skip
        if broken := rows.keys() - whole.keys():
            logger.info("%s: dropping %d blobs that are not whole", self.directory, len(broken))
            self._index.write(dict.fromkeys(broken))
        for file in sizes.keys() - {row.file for row in whole.values()}:
            self._path(file).unlink(missing_ok=True)
        return whole

    def _write_payloads(self, payloads: Sequence[Payload]) -> dict[str, TierError]:
        """Write all, then sync all: what the first sync writes out, the others need not."""
        failed: dict[str, TierError] = {}
        with contextlib.ExitStack() as open_files:
            files = {}
            for one in payloads:
                with self._failing(one.row.file, failed):
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                    file = os.open(self._path(one.row.file), flags, 0o600)
                    files[one.row.file] = file
                    open_files.callback(os.close, file)
                    _write_all(file, one.buffer)
            for name, file in files.items():
                with self._failing(name, failed):
                    if name not in failed:
                        os.fdatasync(file)
        if len(failed) < len(payloads):
            _sync_directory(self._payloads)
        return failed

    @contextlib.contextmanager
    def _failing(self, file: str, failed: dict[str, TierError]) -> Iterator[None]:
        """An error of the operating system is this file's only. Its room is given back at once."""
        try:
            yield
        except OSError as error:
            self._discard([file])
            failed[file] = self._tier_error(error)

    def _discard(self, files: Iterable[str]) -> None:
        """Unlink what no row refers to; what cannot be unlinked now is at the next start."""
        for file in files:
            with contextlib.suppress(OSError):
                self._path(file).unlink()

    def _sizes(self) -> dict[str, int]:
        """Bytes of every payload file. Other files in the directory are left alone."""
        with os.scandir(self._payloads) as entries:
            named = [(PAYLOAD_FILE.fullmatch(entry.name), entry) for entry in entries]
            return {match[1]: entry.stat().st_size for match, entry in named if match}

    def _path(self, file: str) -> Path:
        return self._payloads / f"{file}.kv"

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, lmdb.Error) as error:
            raise self._tier_error(error) from error

    def _tier_error(self, error: OSError | lmdb.Error) -> TierError:
        # Some errors of LMDB have no code.
        code = error.errno if isinstance(error, OSError) else getattr(error, "code", None)
        if code in FULL:
            return TierExhaustedError(f"{self.directory}: the disk is full: {error}")
        return TierUnavailableError(f"{self.directory}: {error}")


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _write_all(file: int, payload: Buffer) -> None:
    """A single write stops at 2 GiB, or where the disk is full."""
    while payload:
        payload = payload[os.write(file, payload) :]


def _blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES

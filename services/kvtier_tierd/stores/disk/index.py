"""The index of the disk store: one LMDB row per blob, and one that says which format this is.

    b"format"         FORMAT
    namespace | key   ID of the payload's file, payload bytes, last use, checksum, layout

It is read once, at the start, and written from then on; what is served is looked up in memory. So
nothing is served from unchecked pages: before LMDB maps the file, `lmdb.verify` walks through it
with ordinary reads. An index that fails this, or is another program's, is set aside and a new one
begun: this is a cache.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import struct
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import lmdb
from lmdb.verify import VerifyError, verify

from kvtier.tier.blobs.keys import KEY_BYTES
from kvtier.tier.blobs.payload import CHECKSUM_BYTES
from kvtier_tierd.stores.base import BlobInfo, BlobName

FORMAT = b"kvtier disk store 1"
FORMAT_KEY = b"format"  # shorter than any blob's
FIRST_MAP_BYTES = 64 << 20
# A transaction writes a few pages; a disk with less room than that is full.
LITTLE_BYTES = 64 << 10
# A file that cannot be read is damaged; one that we may not read is an operator's mistake.
UNREADABLE = {errno.EIO, errno.ESTALE, errno.EBADMSG, errno.EUCLEAN}

_ROW = struct.Struct(f"<16sQQ{CHECKSUM_BYTES}s")

logger = logging.getLogger(__name__)


class Row(NamedTuple):
    """A blob of the index. file: ID of its payload's; used: larger is more recent."""

    file: str
    info: BlobInfo
    used: int


class DamagedIndexError(Exception):
    """An error of an index that is not ours, or no longer."""


class DiskIndex:
    """The rows of one store. One thread at a time; raises OSError and lmdb.Error.

    directory: of the index alone; its parent takes what is set aside.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._environment: lmdb.Environment | None = None

    def open(self) -> dict[BlobName, Row]:
        """The rows; none, after a warning in the log, where there was no sound index of ours."""
        try:
            self._verify()
            return self.rows()
        except DamagedIndexError as error:
            self._set_aside(str(error))
            return self.rows()

    def rows(self) -> dict[BlobName, Row]:
        """Everything in the index. Raises DamagedIndexError."""
        try:
            with self._opened().begin() as transaction:
                found = dict(transaction.cursor())
            if found.pop(FORMAT_KEY, None) != FORMAT:
                raise DamagedIndexError("not an index of this version")
            return dict(_decode(key, value) for key, value in found.items())
        except (struct.error, UnicodeDecodeError) as error:
            raise DamagedIndexError(f"a row that makes no sense: {error}") from error
        except lmdb.Error as error:
            if getattr(error, "code", 0) > 0:  # the operating system's code
                raise
            raise DamagedIndexError(str(error)) from error

    def write(self, rows: Mapping[BlobName, Row | None]) -> None:
        """Set rows, or remove those that are None, in one transaction: all of it or nothing.

        After an error it may be either; writing the same again is always right.
        """
        while rows:
            environment = self._opened()
            try:
                with environment.begin(write=True) as transaction:
                    for name, row in rows.items():
                        if row is None:
                            transaction.delete(_key(name))
                        else:
                            transaction.put(_key(name), _encode(row))
                return
            except lmdb.MapFullError:
                # Rows are paid for in blobs' costs, so the budget bounds them and not the map.
                environment.set_mapsize(2 * environment.info()["map_size"])
            except lmdb.Error as error:
                # LMDB calls a write that ends early an I/O error, and so does a full disk.
                full = getattr(error, "code", None) == errno.EIO and self._disk_is_full()
                # LMDB can refuse everything after an error; a fresh environment can do better.
                self.close()
                if full:
                    raise OSError(errno.ENOSPC, f"no room for the index: {error}") from error
                raise

    def close(self) -> None:
        """May be called in any state; the next call of another method opens it again."""
        if self._environment is not None:
            environment, self._environment = self._environment, None
            try:
                environment.sync()
            finally:
                environment.close()

    def _opened(self) -> lmdb.Environment:
        if self._environment is None:
            # No lock of LMDB's own: the directory's lock keeps others out, one thread comes in.
            self._environment = lmdb.open(
                str(self.directory),
                map_size=FIRST_MAP_BYTES,
                mode=0o600,
                lock=False,
                metasync=False,
            )
            if self._environment.stat()["entries"] == 0:
                with self._environment.begin(write=True) as transaction:
                    transaction.put(FORMAT_KEY, FORMAT)
        return self._environment

    def _disk_is_full(self) -> bool:
        disk = os.statvfs(self.directory)
        return disk.f_bavail * disk.f_frsize < LITTLE_BYTES

    def _verify(self) -> None:
        """Raise DamagedIndexError unless LMDB may trust the file."""
        data = self.directory / "data.mdb"
        if not data.exists():
            return
        try:
            problems: list[str] = verify(str(data))  # type: ignore[no-untyped-call]
        except VerifyError as error:
            raise DamagedIndexError(str(error)) from error
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            raise DamagedIndexError(str(error)) from error
        if problems:
            raise DamagedIndexError("; ".join(problems[:3]))

    def _set_aside(self, why: str) -> None:
        """Move the index out of the way. Only the latest is kept, or the disk would fill up."""
        self.close()
        parent = self.directory.parent
        for earlier in parent.glob("damaged-????????T??????Z"):
            shutil.rmtree(earlier, ignore_errors=True)
        target = parent / f"damaged-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        self.directory.rename(target)
        self.directory.mkdir(mode=0o700)
        logger.warning("%s: starting empty; the index is now %s: %s", parent, target, why)


def _key(name: BlobName) -> bytes:
    """The second part has a fixed length, so no two names read the same. LMDB's keys have at most
    511 bytes."""
    return name.namespace.encode() + name.key


def _encode(row: Row) -> bytes:
    file, info = bytes.fromhex(row.file), row.info
    return _ROW.pack(file, info.num_bytes, row.used, info.checksum) + info.layout


def _decode(key: bytes, value: bytes) -> tuple[BlobName, Row]:
    file, num_bytes, used, checksum = _ROW.unpack_from(value)
    name = BlobName(key[:-KEY_BYTES].decode(), key[-KEY_BYTES:])
    return name, Row(file.hex(), BlobInfo(num_bytes, value[_ROW.size :], checksum), used)

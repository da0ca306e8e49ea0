"""The store `disk`: blobs that survive the service; the least recently used one goes first.

What survives, of blobs whose commit has returned:

    the process is killed (kill -9)      all of them
    the system crashes, power is lost    all but those that the last write stored or replaced, as
                                         far as the disk does what it is told; each is whole or not
                                         there
    the disk loses or damages a file     the others; that one is a miss
    the index is damaged                 none: the store starts empty

The order of uses is written along with blobs and when the store closes: a crash loses the uses
since the last write, never the blobs. Delete and quarantine last as commits do.

One thread writes, and commits that wait for it share a write (writer.py); readers have threads
of their own. Memory, besides about 1.5 KiB per blob held: a draft holds its payload until it is
written or aborted, and how many drafts there are is up to the caller; the handles of a blob share
one copy of it, and all such copies a budget.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np

from kvtier.errors import TierError, TierExhaustedError, UsageError
from kvtier_tierd.limits import Budget
from kvtier_tierd.stores.base import (
    BlobInfo,
    BlobName,
    BlobStore,
    Buffer,
    Draft,
    Handle,
    StoreResources,
    StoreStats,
)
from kvtier_tierd.stores.disk.index import Row
from kvtier_tierd.stores.disk.medium import DiskMedium, Payload, cost
from kvtier_tierd.stores.disk.writer import GroupWriter
from kvtier_tierd.stores.lru import Entry, LruAccount
from kvtier_tierd.stores.options import DIRECTORY, SIZE, Flag, StoreOptions

READERS = 4
TRIES = 3  # tries of a commit on a full disk, each after evicting as many bytes as it needs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DiskOptions(StoreOptions):
    """disk_path: the directory, without which there is no store. disk_bytes: its capacity."""

    kind: ClassVar[str] = "disk"

    disk_path: Annotated[Path | None, Flag("--disk-path", "of the disk store", DIRECTORY)] = None
    disk_bytes: Annotated[int, Flag("--disk", "of the disk store (%(default)s)", SIZE, least=1)] = (
        64 << 30
    )


@dataclass
class Blob:
    """A blob that is served, or no longer and waiting for its readers, whom its entry counts.

    reading: the payload that they share, from the first to the last of them.
    """

    name: BlobName
    row: Row
    entry: Entry
    reading: asyncio.Future[Buffer | None] | None = None


class DiskStore(BlobStore):
    """Blobs in files of one directory.

    directory:      created where it is missing; of one service at a time.
    capacity_bytes: of the payloads in whole blocks of 4096 bytes and, for each blob, 4096 bytes (or
                    more, with a layout of more than 1.5 KiB) for its row, inode and name. At no
                    time is more than that on disk, besides what an empty store takes.
    quotas:         bytes by namespace, counted alike.
    budget:         of what is read; where it is used up `open` raises TierExhaustedError.
    """

    options_type = DiskOptions

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        quotas: Mapping[str, int] | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.budget = Budget(sys.maxsize) if budget is None else budget
        self.account = LruAccount(capacity_bytes, quotas)
        self.quarantined = 0
        self._medium = DiskMedium(directory)
        self._writer = GroupWriter(self._medium, self._row_of, self._settle)
        self._readers = ThreadPoolExecutor(READERS, "disk-store-reader")
        self._blobs: dict[BlobName, Blob] = {}
        self._leaving: set[str] = set()  # files of blobs that are hidden and still read
        self._tries: Counter[str] = Counter()
        self._clock = 0

    @classmethod
    def make(cls, options: DiskOptions, resources: StoreResources) -> DiskStore:
        """Raises UsageError without a directory."""
        if options.disk_path is None:
            raise UsageError("--disk-path", f"a directory for --store {options.kind}", None)
        return cls(options.disk_path, options.disk_bytes, resources.quotas, budget=resources.budget)

    async def start(self) -> None:
        rows = await self._writer.run(self._medium.open)
        # Capacity and quotas may be smaller than before.
        fitting = self.account.fitting({name: cost(row.info) for name, row in rows.items()})
        for name, row in rows.items():
            self._clock = row.used
            if name in fitting:
                self._blobs[name] = Blob(name, row, self.account.add(name, cost(row.info)))
            else:
                self._writer.changed[name] = None
                self._writer.doomed.append(row.file)
        if self._writer.changed:
            await self._writer.write()

    async def close(self) -> None:
        try:
            await self._writer.finish()
        except TierError as error:
            logger.warning("the latest uses and evictions are not on disk: %s", error)
        finally:
            self._readers.shutdown()

    async def exists(self, names: Sequence[BlobName]) -> list[bool]:
        return [name in self._blobs for name in names]

    def check(self, name: BlobName, info: BlobInfo) -> None:
        self.account.check(name.namespace, cost(info))

    async def reserve(self, name: BlobName, info: BlobInfo) -> Draft:
        self.check(name, info)
        victims = self.account.plan(name.namespace, cost(info))
        try:
            draft = Draft(name, info, np.empty(info.num_bytes, np.uint8).data)
        except MemoryError as error:
            raise TierExhaustedError(f"no memory for {info.num_bytes} bytes") from error
        for victim in victims:
            self._forget(self._blobs[victim], evicted=True)
        self.account.reserve(name.namespace, cost(info))
        return draft

    async def commit(self, draft: Draft) -> None:
        """Commit a draft as the interface says; where this fails, the draft's room is given back,
        too."""
        row = Row(secrets.token_hex(16), draft.info, self._tick())
        await self._writer.write(Payload(draft.name, row, draft.buffer))

    async def abort(self, draft: Draft) -> None:
        self.account.release(draft.name.namespace, cost(draft.info))

    async def open(self, name: BlobName) -> Handle | None:
        blob = self._blobs.get(name)
        if blob is None:
            return None
        reading = self._pin(blob)
        self._use(blob)
        try:
            # A reader that goes away must not take the payload from the others.
            payload = await asyncio.shield(reading)
        except BaseException:
            self._unpin(blob)
            raise
        if payload is not None:
            return Handle(blob.row.info, (payload,), lambda: self._unpin(blob))
        self._unpin(blob)
        if self._blobs.get(name) is blob:
            self.quarantined += 1
            self._forget(blob)
        return None

    def touch(self, names: Iterable[BlobName]) -> None:
        for name in names:
            if name in self._blobs:
                self._use(self._blobs[name])

    def _use(self, blob: Blob) -> None:
        """Note a use of the blob: it gets to disk along with blobs."""
        blob.row = blob.row._replace(used=self._tick())
        self._writer.use(blob.name)
        self.account.touch(blob.name)

    async def delete(self, name: BlobName) -> bool:
        if name not in self._blobs:
            return False
        self._forget(self._blobs[name])
        await self._writer.write()
        return True

    async def quarantine(self, name: BlobName) -> None:
        self.quarantined += name in self._blobs
        await self.delete(name)

    def stats(self) -> StoreStats:
        return self.account.stats(self.kind, self.quarantined)

    def check_integrity(self) -> list[str]:
        """Return problems as the interface says; blocks, and means nothing while a caller waits for
        a write."""
        problems = self.account.check_integrity()
        if {name: blob.entry for name, blob in self._blobs.items()} != self.account.entries:
            problems.append("blobs and their account differ")
        rows = {name: blob.row for name, blob in self._blobs.items()}
        files = {row.file for row in rows.values()} | self._leaving
        return problems + self._writer.check(rows, files)

    def _pin(self, blob: Blob) -> asyncio.Future[Buffer | None]:
        """The payload for one more reader, which the first of them has read."""
        if blob.reading is None:
            self.budget.take(blob.name.namespace, blob.row.info.num_bytes)
            loop = asyncio.get_running_loop()
            blob.reading = loop.run_in_executor(self._readers, self._medium.read, blob.row)
        blob.entry.pins += 1
        return blob.reading

    def _let_go(self, blob: Blob) -> None:
        """The payload's last reader is gone; a thread may still be reading the file."""
        reading, blob.reading = blob.reading, None
        assert reading is not None, "the reader that pinned it reads it"
        namespace, num_bytes = blob.name.namespace, blob.row.info.num_bytes

        def over(done: asyncio.Future[Buffer | None]) -> None:
            # The exception is looked at, because asyncio would complain of an error that no task
            # has waited for.
            if not done.cancelled():
                done.exception()
            self.budget.give_back(namespace, num_bytes)

        if reading.done():
            over(reading)
        else:
            reading.add_done_callback(over)

    def _unpin(self, blob: Blob) -> None:
        """A handle of `blob` closed."""
        blob.entry.pins -= 1
        if blob.entry.pins:
            return
        self._let_go(blob)
        if self._blobs.get(blob.name) is not blob:
            self.account.release(blob.name.namespace, blob.entry.num_bytes)
            self._leaving.remove(blob.row.file)
            self._writer.doomed.append(blob.row.file)

    def _forget(self, blob: Blob, *, evicted: bool = False) -> None:
        """Serve a blob no longer. Its file and its bytes go with its last reader."""
        del self._blobs[blob.name]
        self.account.remove(blob.name, evicted=evicted)
        self._writer.changed[blob.name] = None
        if blob.entry.pins:
            self.account.reserve(blob.name.namespace, blob.entry.num_bytes)
            self._leaving.add(blob.row.file)
        else:
            self._writer.doomed.append(blob.row.file)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    # ---- for the writer

    def _row_of(self, name: BlobName) -> Row | None:
        blob = self._blobs.get(name)
        return None if blob is None else blob.row

    def _settle(self, payload: Payload, error: Exception | None) -> bool:
        """Serve what was written, or give its room back; whether to try again after an error."""
        name, row, _ = payload
        if isinstance(error, TierExhaustedError) and self._evict_for(row):
            return True
        self._tries.pop(row.file, None)
        self.account.release(name.namespace, cost(row.info))
        if error is None:
            if name in self._blobs:
                self._forget(self._blobs[name])
            self._blobs[name] = Blob(name, row, self.account.add(name, cost(row.info)))
            # The row has just been written; what was noted about the name is older.
            self._writer.changed.pop(name, None)
        return False

    def _evict_for(self, row: Row) -> bool:
        """Make room on a disk that is full before its time; whether trying again is any use."""
        self._tries[row.file] += 1
        missing, victims = cost(row.info), []
        for name, entry in self.account.entries.items():
            if missing <= 0:
                break
            if not entry.pins:
                victims.append(name)
                missing -= entry.num_bytes
        if missing > 0 or self._tries[row.file] >= TRIES:
            return False
        for name in victims:
            self._forget(self._blobs[name], evicted=True)
        return True

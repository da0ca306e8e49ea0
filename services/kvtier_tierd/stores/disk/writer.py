"""Group commit: one write at a time, and a caller that asks while it runs is part of the next.

Collects what is not on disk yet, so that a write brings all of it: new payloads, names whose rows
changed, files to unlink, and uses, which are the first to wait when there is much to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from kvtier_tierd.stores.base import BlobName
from kvtier_tierd.stores.disk.index import Row
from kvtier_tierd.stores.disk.medium import DiskMedium, Payload

GROUP = 64  # payloads written together; bounds how long the first of them waits
USES_PER_WRITE = 256

Result = TypeVar("Result")


@dataclass
class Waiter:
    """A caller that wants the next write done. payload: to be part of it."""

    done: asyncio.Future[None]
    payload: Payload | None


class GroupWriter:
    """Writes for one event loop, in a thread that only `run` enters.

    row_of: what the index shall say of a name when it is written; None: nothing.
    settle: called once per written payload, or with the error that kept it from being written;
            returns whether to try again. It is called even if the one who waited was cancelled.

    changed: names whose rows on disk may not be `row_of`; doomed: files to unlink.
    """

    def __init__(
        self,
        medium: DiskMedium,
        row_of: Callable[[BlobName], Row | None],
        settle: Callable[[Payload, Exception | None], bool],
    ) -> None:
        self.changed: dict[BlobName, None] = {}
        self.doomed: list[str] = []
        self._used: dict[BlobName, None] = {}
        self._medium, self._row_of, self._settle = medium, row_of, settle
        self._waiters: list[Waiter] = []
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "disk-store-writer")

    def use(self, name: BlobName) -> None:
        """Note a use, now the latest."""
        self._used.pop(name, None)
        self._used[name] = None

    async def write(self, payload: Payload | None = None) -> None:
        """Wait until everything up to now is on disk, and `payload` with it.

        Raises what kept it from getting there. A caller that is cancelled changes nothing.
        """
        waiter = Waiter(asyncio.get_running_loop().create_future(), payload)
        self._waiters.append(waiter)
        if self._task is None:
            self._task = asyncio.create_task(self._write_groups())
        await waiter.done

    async def finish(self) -> None:
        """Wait for all writes, then write what is left. The writer cannot be used afterwards."""
        while self._task is not None:
            await asyncio.wait([self._task])
        try:
            await self.run(self._medium.write, [], *self._noted(len(self._used)))
        finally:
            await self.run(self._medium.close)
            self._thread.shutdown()

    def run(self, call: Callable[..., Result], *arguments: Any) -> asyncio.Future[Result]:
        """Make a call in the writing thread."""
        return asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def check(self, rows: Mapping[BlobName, Row], files: set[str]) -> list[str]:
        """Return the differences between the disk and what it should hold, besides what is not
        there yet; blocks."""
        known = {name: row for name, row in rows.items() if name not in self.changed}
        check = self._medium.check
        files = files | set(self.doomed)
        return self._thread.submit(check, known, files, set(self.changed)).result()

    async def _write_groups(self) -> None:
        try:
            while self._waiters:
                group, self._waiters = self._waiters[:GROUP], self._waiters[GROUP:]
                await self._write_group(group)
        finally:
            self._task = None

    async def _write_group(self, group: Sequence[Waiter]) -> None:
        payloads = [one.payload for one in group if one.payload is not None]
        rows, doomed = self._noted(USES_PER_WRITE)
        failed: Mapping[str, Exception] = {}
        everything: Exception | None = None
        try:
            failed = await self.run(self._medium.write, payloads, rows, doomed)
        except Exception as error:
            # Even of a bug those who wait have to hear.
            everything = error
            # With the payloads that got as far as the index, and no others: on a disk that refuses
            # them all, every put would be written again with every later one.
            self.changed.update(dict.fromkeys(rows))
            self.doomed += doomed
        for waiter in group:
            payload = waiter.payload
            why = everything or (failed.get(payload.row.file) if payload is not None else None)
            if payload is not None and self._settle(payload, why):
                self._waiters.append(waiter)
            elif waiter.done.done():  # cancelled
                continue
            elif why is None:
                waiter.done.set_result(None)
            else:
                waiter.done.set_exception(why)

    def _noted(self, uses: int) -> tuple[dict[BlobName, Row | None], list[str]]:
        """Return the rows that changed, with so many uses, and the files to unlink, for a write."""
        for _ in range(min(uses, len(self._used))):
            self.changed[self._used.popitem()[0]] = None
        rows, doomed = {name: self._row_of(name) for name in self.changed}, self.doomed
        self.changed, self.doomed = {}, []
        return rows, doomed

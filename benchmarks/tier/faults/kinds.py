"""The six kinds of faults: how the tier is served for each, what is done to it, what one is.

A kind serves a tier at the engine's address, injects until it has counted enough events, and heals
it. It never restarts the engine, and looks at it only through its tally.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tier.faults.processes import (
    Process,
    connections,
    fill,
    free_address,
    meddling_proxy,
    new_dials,
    small_disk,
    started,
    tier_service,
)
from benchmarks.tier.faults.proxies import (
    BIT,
    CUT_OFF,
    FLIP,
    INTACT,
    PERCENT,
    SLOW,
    SLOWED,
    Resetting,
)
from kvtier_tierd.options import TierOptions
from kvtier_tierd.stores.disk.store import DiskOptions
from kvtier_tierd.stores.layered import LayeredOptions
from kvtier_tierd.stores.memory import MemoryOptions

SHARED_MEMORY = Path("/dev/shm")
# Each with room for all the visits under way: what is evicted cannot be restored.
MEMORY_BYTES = 256 << 20
DISK_BYTES = 512 << 20
SMALL_DISK_BYTES = 320 << 20
# Nothing has happened for so long: give up, with fewer events. Longer than an engine remembers
# that loading was slower than computing.
PATIENCE_S = 75.0
LOOK_S = 0.25


class Where(NamedTuple):
    """address: where the engine looks for its tier; folder: an empty one; refused: puts that the
    tier has refused to the engine for want of room, so far; used: waits until puts and restores
    happen, returns whether they did; deadline_s: of a call."""

    address: str
    folder: Path
    refused: Callable[[], int]
    used: Callable[[], bool]
    deadline_s: float
    seed: int


class Kind(ABC):
    """One kind. name; event: what is counted; served: how the tier is set up, for the report.

    events, details: what was counted. Used once.
    """

    name: str
    event: str
    served: str

    def __init__(self, where: Where) -> None:
        self.where = where
        self.chance = random.Random(where.seed)
        self.events = 0
        self.details: dict[str, int] = {}

    @abstractmethod
    def serving(self, stack: ExitStack) -> None:
        """Serve a tier that is well, until the stack is closed."""

    @abstractmethod
    def inject(self, wanted: int) -> None:
        """Count `wanted` events, or as many as come; the tier is well again afterwards."""

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as stack:
            self.serving(stack)
            yield

    def options(self, **more: Any) -> TierOptions:
        store = MemoryOptions(MEMORY_BYTES)
        right: dict[str, Any] = {"listen": self.where.address, "store": store, "insecure": True}
        return TierOptions(**right | more)

    def wait_for(self, count: Callable[[], int], wanted: int) -> bool:
        """Follow a count until it is high enough; False where it stands still before."""
        since = time.monotonic()
        while self.events < wanted:
            if time.monotonic() - since > PATIENCE_S:
                return False
            time.sleep(LOOK_S)
            if (now := count()) > self.events:
                self.events, since = now, time.monotonic()
        return True


class Kill(Kind):
    name = "kill -9"
    event = "one kill -9 of the service's process, and its restart, while the engine serves"
    served = "memory and disk, shared memory"
    # Half of the services are killed as soon as they have their engine back, or soon after.
    LONGEST_LIFE_S, LONGEST_WAIT_S = 0.2, 1.0

    def serving(self, stack: ExitStack) -> None:
        self.details = {"with_the_engine_connected": 0}
        self._options = self.options(
            store=LayeredOptions(
                disk_path=self.where.folder / "disk",
                disk_bytes=DISK_BYTES,
                memory_bytes=MEMORY_BYTES // 8,
            ),
            shared_directory=SHARED_MEMORY,
        )
        self._service = Process(tier_service, self._options)
        stack.callback(lambda: self._service.kill())

    def inject(self, wanted: int) -> None:
        while self.events < wanted:
            until = time.monotonic() + self.chance.choice((0.0, self.LONGEST_WAIT_S))
            while not connections(self.where.address) and time.monotonic() < until:
                time.sleep(0.005)
            time.sleep(self.chance.uniform(0, self.LONGEST_LIFE_S))
            self.details["with_the_engine_connected"] += connections(self.where.address) > 0
            self._service.kill()
            self.events += 1
            self._service = Process(tier_service, self._options)


class Stop(Kind):
    name = "SIGSTOP"
    event = "one SIGSTOP of the service's process, and its SIGCONT, while the engine serves"
    served = "memory, shared memory"
    SHORT_S, LONG_SHARE = (0.01, 0.06), 0.1

    def serving(self, stack: ExitStack) -> None:
        self.details = {"longer_than_a_deadline": 0, "with_the_engine_connected": 0}
        options = self.options(shared_directory=SHARED_MEMORY)
        self._service = stack.enter_context(started(tier_service, options))

    def inject(self, wanted: int) -> None:
        while self.events < wanted:
            long = self.chance.random() < self.LONG_SHARE
            bounds = (self.where.deadline_s, 2 * self.where.deadline_s) if long else self.SHORT_S
            self.details["with_the_engine_connected"] += connections(self.where.address) > 0
            self._service.send(signal.SIGSTOP)
            try:
                time.sleep(self.chance.uniform(*bounds))
            finally:
                self._service.send(signal.SIGCONT)
            self.events += 1
            self.details["longer_than_a_deadline"] += long
            time.sleep(self.chance.uniform(*self.SHORT_S))


class Meddled(Kind):
    """A fault that a Meddling proxy makes, switched by one of its dials."""

    dial: int
    served = "memory, streamed through a gRPC proxy; no shared memory"

    def serving(self, stack: ExitStack) -> None:
        service = stack.enter_context(started(tier_service, self.options(listen="127.0.0.1:0")))
        self.dials = new_dials()
        arguments = (self.where.address, service.address, self.dials, self.where.seed)
        stack.enter_context(started(meddling_proxy, *arguments))

    @abstractmethod
    def count(self) -> int:
        """Events so far."""

    def inject(self, wanted: int) -> None:
        self.dials[self.dial] = 1
        try:
            self.wait_for(self.count, wanted)
        finally:
            self.dials[self.dial] = 0


class Slow(Meddled):
    name, dial = "10x slow", SLOW
    event = "one call answered after ten times the time it took, or cut off by its deadline before"

    def count(self) -> int:
        self.details = {"answered_late": self.dials[SLOWED], "cut_off": self.dials[CUT_OFF]}
        return sum(self.details.values())


class Flip(Meddled):
    name, dial = "bit flips", FLIP
    event = "one payload delivered with one flipped bit, or (half of them) one in 1% of its bytes"

    def count(self) -> int:
        self.details = {
            "one_bit": self.dials[BIT],
            "one_percent_of_bytes": self.dials[PERCENT],
            "delivered_intact_meanwhile": self.dials[INTACT],
        }
        return self.dials[BIT] + self.dials[PERCENT]


class DiskFull(Kind):
    """Another program fills all of a small tmpfs but what an index needs, and leaves it again.

    A store that has something on a disk that fills up gives up its oldest blobs for new ones and
    refuses none; so each time a store begins anew on the full disk, where it has nothing to give.
    """

    name = "disk full"
    event = "one put refused to the engine by a store whose disk said ENOSPC"
    served = "disk, on a tmpfs of 320 MiB that is full, then not, several times; no shared memory"
    TIMES = 5
    LEFT_BYTES = 120 << 10  # less than a span's payload

    def serving(self, stack: ExitStack) -> None:
        self._disk = stack.enter_context(small_disk(self.where.folder / "small", SMALL_DISK_BYTES))
        self._service = self._started("before")
        stack.callback(lambda: self._service.kill())

    def _started(self, name: str) -> Process:
        path = self._disk / f"store-{name}"
        options = self.options(store=DiskOptions(path, SMALL_DISK_BYTES * 3 // 4))
        return Process(tier_service, options)

    def inject(self, wanted: int) -> None:
        before = self.where.refused()
        self.details = {"times_full": 0, "used_again_between": 0}
        neighbour = self._disk / "neighbour"

        def count() -> int:
            return self.where.refused() - before

        for number in range(1, self.TIMES + 1):
            self._service.kill()
            for store in self._disk.glob("store-*"):
                shutil.rmtree(store)
            fill(neighbour, self.LEFT_BYTES)
            self._service = self._started(str(number))
            enough = self.wait_for(count, wanted * number // self.TIMES)
            neighbour.unlink()
            self.details["times_full"] += 1
            if not enough:
                break
            self.details["used_again_between"] += self.where.used()
        self.events = count()


class Reset(Kind):
    name = "resets"
    event = "one connection of the engine's reset (RST) by a TCP proxy in the middle of its bytes"
    served = "memory, streamed through a TCP proxy; no shared memory"

    def serving(self, stack: ExitStack) -> None:
        service = stack.enter_context(started(tier_service, self.options(listen="127.0.0.1:0")))
        self._proxy = Resetting(self.where.address, service.address, self.where.seed)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="resetting-proxy")
        thread.start()
        stack.callback(loop.close)
        stack.callback(thread.join)
        stack.callback(loop.call_soon_threadsafe, loop.stop)
        asyncio.run_coroutine_threadsafe(self._proxy.start(), loop).result(PATIENCE_S)
        stack.callback(
            lambda: asyncio.run_coroutine_threadsafe(self._proxy.stop(), loop).result(PATIENCE_S)
        )

    def inject(self, wanted: int) -> None:
        self._proxy.active = True
        try:
            self.wait_for(lambda: self._proxy.resets, wanted)
        finally:
            self._proxy.active = False


KINDS: dict[str, type[Kind]] = {
    "kill": Kill,
    "stop": Stop,
    "slow": Slow,
    "bit-flip": Flip,
    "disk-full": DiskFull,
    "reset": Reset,
}

__all__ = ["KINDS", "Kind", "Where", "free_address"]

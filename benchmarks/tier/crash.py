"""The effect of kill -9 on the tier's disk store: nothing corrupt is served, nothing kept is lost.

    python -m benchmarks.tier.crash

A process fills a store, four blobs at a time, and is killed at a random moment: while it starts,
writes, replaces, deletes or evicts. Then the store is opened again, or started by the next process
that is killed; every blob that it then offers is read, checked against its checksum and compared
with what had been written. One directory goes through all of it.

    corrupt      does not match its checksum, or is another blob
    outdated     is a version that had been replaced
    came back    had been deleted, and that had returned
    lost         had been committed, that had returned, and it was too recent to have been evicted
"""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import xxhash

from benchmarks.common.bars import at_most
from benchmarks.common.benchmark import RESULTS, ROOT, Arguments, Benchmark, Measured, Options
from benchmarks.tier.crash_writer import MOST_BYTES, WRITERS, blob_name, read_header
from kvtier_tierd.stores.base import BlobInfo
from kvtier_tierd.stores.disk.medium import cost
from kvtier_tierd.stores.disk.store import DiskStore

CAPACITY_BYTES = 24 << 20
LONGEST_RUN_S = 0.25
KILLED_WHILE_STARTING = 0.1
KILLED_AGAIN = 0.2  # without a look in between


@dataclass
class Outcome:
    """The outcome of all kills. `restart_s`: of every restart that was looked at, without its
    payloads."""

    kills: int = 0
    killed_while_starting: int = 0
    returned: int = 0
    interrupted: int = 0
    leftover_files: int = 0
    blobs_read: int = 0
    blobs_that_must_be_there: int = 0
    corrupt: int = 0
    outdated: int = 0
    came_back: int = 0
    lost: int = 0
    restart_s: list[float] = field(default_factory=list)

    @property
    def failures(self) -> int:
        return self.corrupt + self.outdated + self.came_back + self.lost


class State(NamedTuple):
    """A blob's state. version: None where it is deleted; begun: bytes put in all before that."""

    version: int | None
    begun: int


@dataclass
class Journal:
    """The journal of what the writers said, by blob number.

    held:  what the last operation that returned has made of a blob
    doubt: what operations that were interrupted since may have made of it
    """

    held: dict[int, State] = field(default_factory=dict)
    doubt: dict[int, list[State]] = field(default_factory=dict)
    put_bytes: int = 0

    @property
    def numbers(self) -> set[int]:
        return {*self.held, *self.doubt}

    def read(self, lines: Sequence[str], outcome: Outcome) -> None:
        """Follow the lines of a writer that was killed."""
        under_way: dict[int, State] = {}
        for line in lines:
            match line.split():
                case ["put", number, put, num_bytes]:
                    under_way[int(number)] = State(int(put), self.put_bytes)
                    self.put_bytes += cost(BlobInfo(int(num_bytes), b"crash", b""))
                case ["delete", number]:
                    under_way[int(number)] = State(None, self.put_bytes)
                case ["done", number]:
                    self.held[int(number)] = under_way.pop(int(number))
                    self.doubt.pop(int(number), None)
                    outcome.returned += 1
        outcome.interrupted += len(under_way)
        for blob, state in under_way.items():
            self.doubt.setdefault(blob, []).append(state)

    def judge(self, number: int, found: int | None, outcome: Outcome) -> None:
        """Compare the version of a blob that the store has with what it should have."""
        known = self.held.get(number, State(None, 0))
        possible = {state.version: state for state in [known, *self.doubt.pop(number, [])]}
        # Nothing evicts a blob before the capacity has been written once more, less what other
        # writers had under way.
        room = CAPACITY_BYTES - WRITERS * (MOST_BYTES + 8192)
        needed = None not in possible and self.put_bytes - known.begun <= room
        outcome.blobs_that_must_be_there += needed
        if found is None:
            outcome.lost += needed
        elif found not in possible:
            outcome.outdated += known.version is not None
            outcome.came_back += known.version is None
        self.held[number] = possible.get(found, State(found, self.put_bytes))


def declare(arguments: Arguments) -> None:
    arguments.whole("--kills", 1000, "how often a writer is killed")


def run(options: Options) -> Measured:
    """Kill as often as asked."""
    with tempfile.TemporaryDirectory() as directory:
        outcome = kill_often(Path(directory) / "store", options.kills, options.seed)
    restart = summary(outcome.restart_s)
    print(f"{outcome.returned} operations returned, {outcome.blobs_read} blobs were read back")
    counts = {key: value for key, value in asdict(outcome).items() if key != "restart_s"}
    settings = {
        "lmdb": version("lmdb"),
        "capacity_bytes": CAPACITY_BYTES,
        "writers": WRITERS,
        "largest_blob_bytes": MOST_BYTES,
        "longest_run_s": LONGEST_RUN_S,
    }
    figures = {"settings": settings, "outcome": counts, "restart_s": restart}
    claimed = ("corrupt", "outdated", "came_back", "lost")
    return Measured(figures, [at_most(f"blobs: {one}", counts[one], 0) for one in claimed])


def kill_often(directory: Path, kills: int, seed: int) -> Outcome:
    """Fill a store and kill its process, `kills` times, and look at what is there afterwards."""
    chance, journal, outcome = random.Random(seed), Journal(), Outcome()
    while outcome.kills < kills:
        starting = chance.random() < KILLED_WHILE_STARTING
        lines = fill_and_kill(directory, chance, starting)
        outcome.kills += 1
        outcome.killed_while_starting += "ready" not in lines
        journal.read(lines, outcome)
        if outcome.kills == kills or chance.random() >= KILLED_AGAIN:
            asyncio.run(look(directory, journal, outcome))
    return outcome


def fill_and_kill(directory: Path, chance: random.Random, starting: bool) -> list[str]:
    """Start a writer, kill it at a random moment and return what it had said."""
    arguments = [str(directory), str(CAPACITY_BYTES), str(chance.getrandbits(32))]
    command = [sys.executable, "-m", "benchmarks.tier.crash_writer", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline().strip()]
        if not starting:
            lines.append(writer.stdout.readline().strip())
        time.sleep(chance.uniform(0, 0.02 if starting else LONGEST_RUN_S))
        if writer.poll() is not None:
            raise RuntimeError(f"the writer ended by itself: {lines}")
        writer.kill()
        lines += writer.stdout.read().splitlines()
    return lines


async def look(directory: Path, journal: Journal, outcome: Outcome) -> None:
    """Restart the store and judge every blob there may be."""
    payloads = directory / "payload"
    before = len(list(payloads.iterdir())) if payloads.exists() else 0
    store = DiskStore(directory, CAPACITY_BYTES)
    began = time.perf_counter()
    await store.start()
    outcome.restart_s.append(time.perf_counter() - began)
    outcome.leftover_files += before - store.stats().blobs
    problems = store.check_integrity()
    assert problems == [], problems
    # In the order of their uses, which reading them then does not change.
    order = {name: place for place, name in enumerate(store.account.entries)}
    for number in sorted(journal.numbers, key=lambda one: order.get(blob_name(one), -1)):
        journal.judge(number, await found_version(store, number, outcome), outcome)
    await store.close()


async def found_version(store: DiskStore, number: int, outcome: Outcome) -> int | None:
    """The version of a blob that the store serves; None where it has none."""
    handle = await store.open(blob_name(number))
    if handle is None:
        return None
    digest = xxhash.xxh3_128()
    for piece in handle.pieces:
        digest.update(piece)
    who, found = read_header(handle.pieces[0])
    outcome.blobs_read += 1
    outcome.corrupt += digest.digest() != handle.info.checksum or who != number
    handle.close()
    return found


def summary(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median": statistics.median(ordered),
        "p99": ordered[int(0.99 * (len(ordered) - 1))],
        "max": ordered[-1],
    }


BENCHMARK = Benchmark("tier.crash", __doc__, declare, run, out=RESULTS / "tier-crash.json")
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())

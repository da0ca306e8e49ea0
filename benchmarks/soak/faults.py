"""The faults of the soak, each by a clock of its own.

of the tier     killed, stopped for a while, behind a way that is slow, flips bits or resets
                connections (soak/proxy.py), with a full disk; one at a time
of the others   Redis is killed; engines get other weights, are emptied, and are ended and
                started by another rule
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.processes import Served
from benchmarks.soak.clients import Engine
from benchmarks.soak.proxy import WAYS, Proxy

TIER_KILL, TIER_STOP, DISK_FULL = "kill -9 of the tier", "SIGSTOP of the tier", "disk full"
REDIS_KILL = "kill -9 of Redis"
WEIGHTS, EMPTIED = "update of the weights", "cache emptied"
RESTART = "restart of an engine"
TIER_FAULTS = (TIER_KILL, TIER_STOP, *WAYS, DISK_FULL)
# Mean seconds between two of a kind.
EVERY_S: Mapping[str, float] = {
    **dict.fromkeys(TIER_FAULTS, 60.0), TIER_KILL: 35.0,
    REDIS_KILL: 40.0, WEIGHTS: 35.0, EMPTIED: 60.0,
}  # fmt: skip
# The longest that a tier or Redis is away. Longer than the tier's breaker needs to open.
AWAY_S = 8.0
# The longest that other faults of the tier last. Longer than several of a call's deadlines.
ILL_S = 4.0
# Less than a span's payload, and enough for an index.
LEFT_BYTES = 120 << 10
# An engine has found a tier that is well again: twice the breaker's longest wait between probes,
# and what a connection needs to be made again.
LONGEST_CLOSING_S = 15.0
SETTLE_S = 60.0
LOOK_S = 5.0


@dataclass
class Damage:
    """The damage that was done, and what was found wrong with an engine's accounts meanwhile.
    closing_s: by fault of the tier, how long an engine's breaker was open after it; looks: at an
    engine that was serving."""

    done: Counter[str] = field(default_factory=Counter)
    closing_s: dict[str, list[float]] = field(default_factory=dict)
    looks: int = 0
    problems: list[str] = field(default_factory=list)


async def again_and_again(
    kind: str,
    rng: random.Random,
    stopping: asyncio.Event,
    damage: Damage,
    fault: Callable[[], Awaitable[int]],
) -> None:
    """A fault at random times until told to stop; the last one is over when this returns. fault:
    returns how often it happened."""
    damage.done.setdefault(kind, 0)
    wait_s = EVERY_S[kind] * rng.random()
    while True:
        try:
            await asyncio.wait_for(stopping.wait(), wait_s)
        except TimeoutError:
            damage.done[kind] += await fault()
            wait_s = EVERY_S[kind] * rng.uniform(0.5, 1.5)
        else:
            return


async def then_well(
    kind: str,
    fault: Callable[[], Awaitable[int]],
    alone: asyncio.Lock,
    engines: Sequence[Engine],
    damage: Damage,
) -> int:
    """A fault of the tier, and how long the engines need to find it well again. alone: held
    meanwhile."""
    async with alone:
        times = await fault()
        found = await asyncio.gather(*map(closing_s, engines))
        damage.closing_s.setdefault(kind, []).extend(one for one in found if one is not None)
    return times


async def closing_s(engine: Engine) -> float | None:
    """Return the seconds until an engine's breaker is closed, or for which it was looked at in
    vain; None where its gate was closed meanwhile, as then nothing answers."""
    closings, began = engine.gate.closings, asyncio.get_running_loop().time()
    while engine.gate.is_open:
        async with engine.gate.entered():
            state = await engine.server.state()
        if engine.gate.closings != closings:
            return None
        taken = asyncio.get_running_loop().time() - began
        if state["tier"]["healthy"] or taken > LONGEST_CLOSING_S:
            return taken
        await asyncio.sleep(0.2)
    return None


async def kill_and_start(served: Served, rng: random.Random) -> int:
    """kill -9; after a while it is there again, where it was."""
    served.kill()
    await asyncio.sleep(rng.random() * AWAY_S)
    await asyncio.to_thread(served.start)
    return 1


async def stop_and_go_on(served: Served, rng: random.Random) -> int:
    """SIGSTOP: connections stay, and no answer comes."""
    with served.stopped():
        await asyncio.sleep(rng.random() * ILL_S)
    return 1


async def bad_way(proxy: Proxy, fault: str, rng: random.Random) -> int:
    """The way to the tier is bad; returns for how many pieces or connections it was."""
    before = proxy.done[fault]
    proxy.fault = fault
    try:
        await asyncio.sleep(ILL_S * rng.uniform(0.25, 1))
    finally:
        proxy.fault = None
    return proxy.done[fault] - before


@contextmanager
def small_disk(directory: Path, num_bytes: int) -> Iterator[bool]:
    """A file system of its own, which can be full; or, for who may not mount one, a directory that
    is none. Yields which."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(directory)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(directory)], check=False)


async def full_disk(disk: Path, rng: random.Random) -> int:
    """Another program fills all of a disk but what an index needs, and leaves it again."""
    neighbour = disk / "neighbour"
    await asyncio.to_thread(fill, neighbour)
    try:
        await asyncio.sleep(ILL_S * rng.uniform(0.25, 1))
    finally:
        neighbour.unlink()
    return 1


def fill(path: Path) -> None:
    """Take all that is free of a disk, but for LEFT_BYTES."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            # This writes what fits: a write to a disk that is nearly full is short before it fails.
            file.write(bytes(1 << 16))
    os.truncate(path, max(0, path.stat().st_size - LEFT_BYTES))


async def other_weights(
    engines: Sequence[Engine], weights: Mapping[str, Path], rng: random.Random
) -> int:
    """One engine gets the other weights.

    No client asks it meanwhile. SGLang itself holds requests back during an update, but not until
    one that was aborted has left the scheduler: then the weights change, the cache is not flushed,
    and KV of the weights before is used with those after until it is flushed.
    """
    engine = rng.choice(engines)
    async with engine.gate.closed():
        # Waits for what was aborted.
        await engine.server.flush()
        version = rng.choice([one for one in weights if one != engine.version])
        await engine.server.load_weights(str(weights[version]), version)
        engine.version = version
    return 1


async def emptied(engines: Sequence[Engine], damage: Damage, rng: random.Random) -> int:
    """An engine without requests: its accounts are looked at, and its cache is emptied."""
    engine = rng.choice(engines)
    async with engine.gate.closed():
        damage.problems += await accounts(engine)
    return 1


async def looks(engine: Engine, damage: Damage) -> None:
    """Look at an engine's accounts while it serves, without end."""
    while True:
        await asyncio.sleep(LOOK_S)
        async with engine.gate.entered():
            state = await engine.server.state()
        damage.looks += 1
        damage.problems += [f"{engine.name}, serving: {one}" for one in state["integrity"]]


async def accounts(engine: Engine) -> list[str]:
    """Return what is wrong with an engine that no client uses: before its cache is emptied, and
    after."""
    state = await settled(engine)
    problems = [f"{engine.name}: {one}" for one in state["integrity"]]
    if state.get("tier", {}).get("pending"):
        problems.append(f"{engine.name}: {state['tier']['pending']} calls to the tier never end")
    await engine.server.flush()
    state = await engine.server.state()
    problems += [f"{engine.name}, emptied: {one}" for one in state["integrity"]]
    if state["slots_used"]:
        problems.append(f"{engine.name}, emptied: {state['slots_used']} slots used")
    return problems


async def settled(engine: Engine) -> dict[str, Any]:
    """Return the engine's state once nothing is on its way to the tier, or after SETTLE_S."""
    until = asyncio.get_running_loop().time() + SETTLE_S
    while True:
        state = await engine.server.state()
        if not state["tier"]["pending"] or asyncio.get_running_loop().time() > until:
            return state
        await asyncio.sleep(0.2)

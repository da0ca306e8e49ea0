"""The faults of the soak, each by a clock of its own: the tier and Redis are killed, engines get
other weights, are emptied, and are ended and started by another rule.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak.clients import Engine
from benchmarks.soak.processes import Served

TIER_KILL, REDIS_KILL = "kill -9 of the tier", "kill -9 of Redis"
WEIGHTS, EMPTIED = "update of the weights", "cache emptied"
RESTART = "restart of an engine"
# Mean seconds between two of a kind.
EVERY_S: Mapping[str, float] = {TIER_KILL: 25.0, REDIS_KILL: 40.0, WEIGHTS: 35.0, EMPTIED: 60.0}
# The longest that a tier or Redis is away. Longer than the tier's breaker needs to open.
AWAY_S = 8.0
SETTLE_S = 60.0
LOOK_S = 5.0


@dataclass
class Damage:
    """The damage that was done, and what was found wrong with an engine's accounts meanwhile.
    looks: at an engine that was serving."""

    done: Counter[str] = field(default_factory=Counter)
    looks: int = 0
    problems: list[str] = field(default_factory=list)


async def again_and_again(
    kind: str,
    rng: random.Random,
    stopping: asyncio.Event,
    damage: Damage,
    fault: Callable[[], Awaitable[None]],
) -> None:
    """A fault at random times until told to stop; the last one is over when this returns."""
    while True:
        try:
            await asyncio.wait_for(stopping.wait(), EVERY_S[kind] * rng.uniform(0.5, 1.5))
        except TimeoutError:
            await fault()
            damage.done[kind] += 1
        else:
            return


async def kill_and_start(served: Served, rng: random.Random) -> None:
    """kill -9; after a while it is there again, where it was."""
    served.kill()
    await asyncio.sleep(rng.random() * AWAY_S)
    await asyncio.to_thread(served.start)


async def other_weights(
    engines: Sequence[Engine], weights: Mapping[str, Path], rng: random.Random
) -> None:
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


async def emptied(engines: Sequence[Engine], rng: random.Random, damage: Damage) -> None:
    """An engine without requests: its accounts are looked at, and its cache is emptied."""
    engine = rng.choice(engines)
    async with engine.gate.closed():
        damage.problems += await accounts(engine)


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


__all__ = [
    "EMPTIED",
    "REDIS_KILL",
    "RESTART",
    "TIER_KILL",
    "WEIGHTS",
    "Damage",
    "accounts",
    "again_and_again",
    "emptied",
    "kill_and_start",
    "looks",
    "other_weights",
    "settled",
]

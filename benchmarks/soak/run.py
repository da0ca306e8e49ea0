"""The soak itself: everything started, asked, failed, watched and compared, for so many minutes."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.common.processes import (
    ProcessError,
    Served,
    free_address,
    redis_process,
    server_process,
    tier_process,
)
from benchmarks.soak import models as models
from benchmarks.soak.check import Checker
from benchmarks.soak.client import Server
from benchmarks.soak.clients import Client, Engine, Tally
from benchmarks.soak.faults import (
    DISK_FULL,
    EMPTIED,
    REDIS_KILL,
    RESTART,
    TIER_KILL,
    TIER_STOP,
    WEIGHTS,
    Damage,
    accounts,
    again_and_again,
    bad_way,
    emptied,
    full_disk,
    kill_and_start,
    looks,
    other_weights,
    settled,
    small_disk,
    stop_and_go_on,
    then_well,
)
from benchmarks.soak.load import Load
from benchmarks.soak.proxy import WAYS, Proxy
from kvtier.config import load_settings
from kvtier.retention.rules import locality_rule

CLIENTS = 6
# The room of each engine: a few sessions, where the clients hold dozens.
DEVICE_TOKENS = 8000
REQUESTS_AT_A_TIME = 4
# Small, so that they are full after a few minutes.
TIER_MEMORY, TIER_DISK = "48m", "128m"
# The file system that the tier's disk is, which has room for an index, too.
SMALL_DISK_BYTES = 192 << 20
WATCH_S, SAMPLE_S = 1.0, 2.0
# The tier fails, and an engine is restarted, in this share of the soak; then they live on, the tier
# is used, and their memory is looked at.
ILL = 2 / 3
# For the breaker to find a tier that is back.
HEALTHY_S = 60.0
# Mean time between two restarts of an engine.
RESTART_MINUTES = 7.0
TIER_NAME = "tier"
KVTIER, STOCK = ("kvtier", "serve"), ("sglang.launch_server",)
# The flags of a reference that computes every answer from nothing.
UNCACHED = ("--attention-backend", "torch_native", "--disable-radix-cache")


@dataclass
class Sample:
    """Resident bytes of one process, seconds after the load began. start: which one it is."""

    at_s: float
    name: str
    start: int
    resident_bytes: int


@dataclass
class Seen:
    """All that came of a soak, for its report. states: what each engine said at the end of each of
    its lives; used_again: by engine, the puts that the tier took and the requests that were
    restored after its last fault."""

    tally: Tally
    checker: Checker
    damage: Damage
    states: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    start_up_s: float = 0.0
    load_s: float = 0.0
    tier: dict[str, Any] = field(default_factory=dict)
    used_again: dict[str, dict[str, int]] = field(default_factory=dict)


class Soak:
    """folder: empty; gets logs and everything else. seed: of sessions, clients and faults, and of
    the rule that engine B begins with."""

    def __init__(self, folder: Path, model: Path, minutes: float, seed: int) -> None:
        self.folder, self.model, self.seconds, self.seed = folder, model, 60 * minutes, seed
        self.rule = locality_rule(load_settings())
        self.adapter = models.write_adapter(model, folder)
        self.full = models.write_full_profile(model, folder)
        self.weights = {
            models.FIRST: model,
            models.SECOND: models.write_other_weights(model, folder),
        }
        self.redis, self.redis_url = redis_process(folder)
        self.tier, self.tier_address = tier_process(folder, TIER_MEMORY, TIER_DISK)
        socket = Path(self.tier_address.removeprefix("unix:"))
        self.proxy = Proxy(free_address(), socket, random.Random(f"{seed} proxy"))
        common = models.server_flags(
            model, self.adapter, device_tokens=DEVICE_TOKENS, requests=REQUESTS_AT_A_TIME
        )
        self.common = common
        rules = list(models.POLICIES)
        self.policies = [*rules, *rules][seed % len(rules) :][: len(rules)]
        self.a, a_url = server_process(
            "engine-a", KVTIER, [*common, *self._rule("engine-a", models.EVERYTHING)], folder
        )
        self.b, b_url = server_process(
            "engine-b", KVTIER, [*common, *self._rule("engine-b", self.policies[0])], folder
        )
        self.stock, self.stock_url = server_process(
            "reference", STOCK, [*common, *UNCACHED], folder
        )
        self.urls = (a_url, b_url)
        self.began = 0.0

    def _rule(self, name: str, policy: str) -> list[str]:
        own = self.folder / name
        own.mkdir(exist_ok=True)
        return models.engine_flags(own, self.redis_url, self.proxy.listen, policy, self.full)

    @property
    def processes(self) -> tuple[Served, ...]:
        return (self.a, self.b, self.stock, self.redis, self.tier)

    def run(self) -> Seen:
        """Soak. Raises ProcessError where something ended by itself, and KeyboardInterrupt on
        SIGTERM; all processes are gone afterwards."""
        with ExitStack() as stack:
            self.disk_can_be_full = stack.enter_context(
                small_disk(self.folder / "disk", SMALL_DISK_BYTES)
            )
            stack.enter_context(all_ended(self.processes))
            began = time.monotonic()
            for served in (self.redis, self.tier):
                served.start()
            models.store_calibration(self.model, self.redis_url)
            for served in (self.stock, self.a, self.b):
                served.launch()
            for served in (self.stock, self.a, self.b):
                served.wait_ready()
            seen = asyncio.run(self._under_load())
            seen.start_up_s = self.began - began
            return seen

    async def _under_load(self) -> Seen:
        timeout = aiohttp.ClientTimeout(total=None)
        # Servers close connections that idle for five seconds, and a request sent on one just then
        # gets no answer, from any server: every request has a connection of its own.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            self.proxy.forwarding(),
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
        ):
            reference = Server(self.stock_url, session)
            checker = Checker(reference, self.weights, models.FIRST)
            seen = Seen(Tally(), checker, Damage())
            names = ("engine A", "engine B")
            policies = (models.EVERYTHING, self.policies[0])
            engines = [
                Engine(name, Server(url, session), policy)
                for name, url, policy in zip(names, self.urls, policies, strict=True)
            ]
            self.began = time.monotonic()
            try:
                async with asyncio.TaskGroup() as group:
                    watching = [
                        group.create_task(one) for one in (self._watch(seen), checker.run())
                    ]
                    await self._soak(engines, seen)
                    for task in watching:
                        task.cancel()
            except Exception as error:
                # A client of a process that ends notices first, but the process's log says why.
                await asyncio.sleep(WATCH_S)
                for served in self.processes:
                    served.check()
                raise first_of(error) from None
            finally:
                # Without this the loop would wait for threads that wait for one of them to answer.
                end(self.processes)
            seen.load_s = time.monotonic() - self.began
        return seen

    async def _soak(self, engines: list[Engine], seen: Seen) -> None:
        """The load and the faults for their time; then everything well again, and looked at."""
        stopping, ill_ends, faults_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        alone = asyncio.Lock()
        load = Load(self.seed, models.adapter_id(self.adapter))
        clients = [
            Client(number, load, engines, seen.checker, seen.tally, self.rule)
            for number in range(CLIENTS)
        ]
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.run(stopping))
            for fault in self._tier_faults(engines, seen.damage, ill_ends, alone):
                group.create_task(fault)
            for fault in self._other_faults(engines, seen.damage, faults_end):
                group.create_task(fault)
            group.create_task(self._restarts(engines[1], seen, self._rng(RESTART)))
            looking = [group.create_task(looks(engine, seen.damage)) for engine in engines]
            await asyncio.sleep(ILL * self.seconds)
            ill_ends.set()
            async with alone:
                before = {engine.name: await tier_use(engine) for engine in engines}
            await asyncio.sleep(max(0.0, self.began + self.seconds - time.monotonic()))
            faults_end.set()
            stopping.set()
            for task in looking:
                task.cancel()
        await seen.checker.done()
        for engine in engines:
            await healthy(engine)
            seen.states.append(await last_state(engine))
            seen.used_again[engine.name] = more(before[engine.name], seen.states[-1]["tier"])
            seen.damage.problems += await accounts(engine)
        seen.tier = await asyncio.to_thread(tier_stats, self.tier_address)

    def _rng(self, kind: str) -> random.Random:
        return random.Random(f"{self.seed} {kind}")

    def _tier_faults(
        self, engines: list[Engine], damage: Damage, end: asyncio.Event, alone: asyncio.Lock
    ) -> Iterator[Coroutine[Any, Any, None]]:
        """Each kind with a clock of its own, and one at a time."""
        faults: dict[str, Callable[[random.Random], Awaitable[int]]] = {
            TIER_KILL: partial(kill_and_start, self.tier),
            TIER_STOP: partial(stop_and_go_on, self.tier),
            **{way: partial(bad_way, self.proxy, way) for way in WAYS},
        }
        if self.disk_can_be_full:
            faults[DISK_FULL] = partial(full_disk, self.folder / "disk")
        for kind, fault in faults.items():
            rng = self._rng(kind)
            once = partial(then_well, kind, partial(fault, rng), alone, engines, damage)
            yield again_and_again(kind, rng, end, damage, once)

    def _other_faults(
        self, engines: list[Engine], damage: Damage, end: asyncio.Event
    ) -> Iterator[Coroutine[Any, Any, None]]:
        faults: dict[str, Callable[[random.Random], Awaitable[int]]] = {
            REDIS_KILL: partial(kill_and_start, self.redis),
            WEIGHTS: partial(other_weights, engines, self.weights),
            EMPTIED: partial(emptied, engines, damage),
        }
        for kind, fault in faults.items():
            rng = self._rng(kind)
            yield again_and_again(kind, rng, end, damage, partial(fault, rng))

    async def _restarts(self, engine: Engine, seen: Seen, rng: random.Random) -> None:
        """The second engine ends, by SIGTERM or by kill -9, and starts by the next rule."""
        ill_s = ILL * self.seconds
        times = max(1, round(ill_s / 60 / RESTART_MINUTES))
        for number in range(times):
            due = self.began + ill_s * (number + 0.6) / times
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            async with engine.gate.closed():
                seen.states.append(await last_state(engine))
                await asyncio.to_thread(rng.choice((self.b.stop, self.b.kill)))
                engine.policy = self.policies[(number + 1) % len(self.policies)]
                rule = self._rule("engine-b", engine.policy)
                self.b.command = restarted(self.b.command, self.common, rule)
                await asyncio.to_thread(self.b.start)
                engine.version = models.FIRST
            seen.damage.done[RESTART] += 1

    async def _watch(self, seen: Seen) -> None:
        """Raises ProcessError as soon as a process has ended by itself; notes their memory."""
        next_s = 0.0
        while True:
            for served in self.processes:
                served.check()
            now = time.monotonic() - self.began
            if now >= next_s:
                next_s = now + SAMPLE_S
                for served in self.processes:
                    found = await asyncio.to_thread(served.resident_bytes)
                    if found is not None:
                        seen.samples.append(Sample(now, served.name, served.starts, found))
            await asyncio.sleep(WATCH_S)


def restarted(command: Sequence[str], common: Sequence[str], rule: Sequence[str]) -> list[str]:
    """An engine's command with another rule: where it listens and who serves are the same."""
    first = command.index(common[0])
    return [*command[:first], *common, *rule, *command[-4:]]


def first_of(error: Exception) -> Exception:
    """The first of a group of errors that is not a group itself."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


async def last_state(engine: Engine) -> dict[str, Any]:
    """Return what an engine that no client asks says of itself before it ends."""
    return {"engine": engine.name, "rule": engine.policy, **await settled(engine)}


async def tier_use(engine: Engine) -> dict[str, Any]:
    """Return what an engine has counted of its tier so far."""
    async with engine.gate.entered():
        tier: dict[str, Any] = (await engine.server.state())["tier"]
    return tier


def more(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    """Return the puts and restores between two states of an engine's tier."""
    names = ("put", "restored_requests")
    return {name: after.get(name, 0) - before.get(name, 0) for name in names}


async def healthy(engine: Engine) -> None:
    """Wait until the engine's breaker is closed. Raises ProcessError where it stays open."""
    until = time.monotonic() + HEALTHY_S
    while not (await engine.server.state())["tier"]["healthy"]:
        if time.monotonic() > until:
            raise ProcessError(f"{engine.name} has not found its tier again after {HEALTHY_S:g} s")
        await asyncio.sleep(0.5)


def tier_stats(address: str) -> dict[str, Any]:
    """Return the tier's statistics."""
    from kvtier.tier.client import TierClient

    with TierClient(address, timeout_s=10) as client:
        client.connect()
        stats = client.stats()
    return {
        name: getattr(stats, name)
        for name in ("store", "capacity_bytes", "used_bytes", "blobs", "evictions", "quarantined")
    }


@contextmanager
def all_ended(processes: Sequence[Served]) -> Iterator[None]:
    """End all processes after the block, whatever happens in it."""
    try:
        yield
    finally:
        # A second signal must not leave half of them behind.
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end(processes)
        signal.signal(signal.SIGTERM, before)


def end(processes: Sequence[Served]) -> None:
    """kill -9 of all of them, but a tier may take its shared memory away with it."""
    for served in processes:
        with suppress(OSError):
            if served.name == TIER_NAME:
                served.stop()
            else:
                served.kill()

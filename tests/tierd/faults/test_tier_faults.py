"""Faults under load: nothing raises, no wrong byte lands, and every link recovers by itself.

The load are links, each as an engine has one, which put and get all the time. What is counted as
hit by a fault is one operation (a put or a get) that asked the tier and failed for it; what the
breaker refused without asking comes on top and does not count. Every fault hits at least HITS.
"""

from __future__ import annotations

import asyncio
import errno
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

import pytest
from live_tier import LAYOUT, fetch, in_process, key_of, live_tier, payload_of
from waiting import SAFETY_S, wait_for

from benchmarks.common.processes import free_address
from benchmarks.soak.proxy import RESETS, Proxy
from kvtier.tier.client import Blob, TierClient
from kvtier.tier.link.breaker import Breaker
from kvtier.tier.link.link import TierLink
from kvtier.tier.link.queues import Fetch
from kvtier_tierd.stores.disk import medium as disk_medium
from kvtier_tierd.stores.disk.store import DiskOptions

HITS = 100
LINKS = 8
TIMEOUT_S = 0.15
TRUTH = {number: payload_of(number, 500 + 811 * number) for number in range(48)}
# Blobs that land between two faults.
SOME = 40


def blob_of(number: int) -> Blob:
    return Blob(key_of(number), LAYOUT, [TRUTH[number]])


class Engine:
    """One link under load. wrong: what landed and was not what was put."""

    def __init__(self, address: str, seed: int, *, timeout_s: float) -> None:
        self.client = TierClient(address, timeout_s=timeout_s, shared=seed % 2 == 0)
        breaker = Breaker(first_s=0.05, longest_s=0.2)
        self.link = TierLink(self.client, buffer_bytes=1 << 20, breaker=breaker)
        self.chance = random.Random(seed)
        self.wrong: list[int] = []
        self.landed = 0
        self._fetches: list[Fetch[None]] = []

    def step(self) -> None:
        """A few puts and a get, unless more than enough are under way."""
        if self.link.pending > 12:
            return
        numbers = self.chance.sample(list(TRUTH), 6)
        blobs = [blob_of(number) for number in numbers[:2]]
        self.link.put(blobs, replace=self.chance.random() < 0.2)
        self._get(numbers)

    def _get(self, numbers: list[int]) -> Fetch[None]:
        def get(client: TierClient) -> None:
            _, landed = fetch(client, [key_of(number) for number in numbers])
            self.landed += len(landed)
            self.wrong += [numbers[at] for at in landed if landed[at] != TRUTH[numbers[at]]]

        self._fetches.append(self.link.submit(get))
        return self._fetches[-1]

    @property
    def failed(self) -> int:
        """Operations that asked the tier and failed for it."""
        counted = dict(self.link.counters).items()
        return sum(number for name, number in counted if name.startswith(("put_Tier", "get_Tier")))

    def waits(self) -> bool:
        """Return whether a get is still under way."""
        return not all(fetch.done for fetch in self._fetches)

    def works(self) -> bool:
        """Return whether a put and a get go through."""
        self.link.put([blob_of(0)], replace=True)
        self._get([0]).wait(SAFETY_S)
        before = self.landed
        return self._get([0]).wait(SAFETY_S) and self.landed > before

    def settle(self) -> None:
        """The fault is over: everything has to be as if it had never been, without a restart."""
        wait_for(lambda: self.link.healthy and self.works())
        assert self.link.flush(SAFETY_S)
        assert not self.waits()
        assert self.link.held_bytes == self.link.pending == 0
        assert self.wrong == []
        assert not [name for name in self.link.counters if name.endswith("_bugs")]


class Fleet:
    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines

    def load_until(self, fact: Callable[[], bool]) -> None:
        """Steady load until this is true."""

        def loaded() -> bool:
            for engine in self.engines:
                engine.step()
            return fact()

        wait_for(loaded, lambda: f"{self.failed} failed: {self.counters}", poll_s=0.001)

    def load(self, landed: int = SOME) -> None:
        """Steady load until so many more blobs have landed."""
        wanted = self.landed + landed
        self.load_until(lambda: self.landed >= wanted)

    @property
    def landed(self) -> int:
        return sum(engine.landed for engine in self.engines)

    @property
    def failed(self) -> int:
        return sum(engine.failed for engine in self.engines)

    @property
    def counters(self) -> Counter[str]:
        return sum((Counter(engine.link.counters) for engine in self.engines), Counter())

    def settle(self) -> None:
        for engine in self.engines:
            engine.settle()


@contextmanager
def fleet(address: str, *, timeout_s: float = TIMEOUT_S) -> Iterator[Fleet]:
    """LINKS engines; half of them share memory."""
    engines = [Engine(address, seed, timeout_s=timeout_s) for seed in range(LINKS)]
    try:
        yield Fleet(engines)
    finally:
        for engine in engines:
            engine.link.close()


@contextmanager
def forwarding(target: str) -> Iterator[Proxy]:
    """A proxy whose loop has a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="proxy")
    thread.start()
    proxy, stack = Proxy(free_address(), target, random.Random(1)), AsyncExitStack()
    try:
        started = stack.enter_async_context(proxy.forwarding())
        asyncio.run_coroutine_threadsafe(started, loop).result(SAFETY_S)
        yield proxy
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(SAFETY_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(SAFETY_S)
        loop.close()


@pytest.mark.parametrize("fault", ["kill -9", "SIGSTOP"])
def test_a_service_that_is_killed_or_hangs(tmp_path, memory_directory, fault):
    """It is killed in the middle of everything and started again on the same port; or connections
    stay and no answer comes, and when it comes it is too late."""
    flags = ("--memory", "4m", "--shared-memory", str(memory_directory))
    with live_tier(tmp_path, *flags) as tier, fleet(tier.address) as engines:
        began, ended = {"kill -9": (tier.kill, tier.start), "SIGSTOP": (tier.pause, tier.resume)}[
            fault
        ]
        faults = 0
        while engines.failed < HITS or faults < 5:
            engines.load()
            enough = engines.failed + LINKS
            began()
            engines.load_until(lambda enough=enough: engines.failed >= enough)
            # After three failures no link asks any more, and every call has ended.
            engines.load_until(lambda: not any(e.link.healthy for e in engines.engines))
            wait_for(lambda: not any(engine.waits() for engine in engines.engines))
            ended()
            faults += 1
            engines.settle()
        assert engines.counters["refused_while_open"] > 0


def test_connections_that_are_reset(tmp_path, memory_directory):
    flags = ("--memory", "4m", "--shared-memory", str(memory_directory))
    with (
        live_tier(tmp_path, *flags) as tier,
        forwarding(tier.address) as proxy,
        fleet(proxy.listen) as engines,
    ):
        while engines.failed < HITS:
            engines.load()
            enough, proxy.fault = engines.failed + LINKS, RESETS
            engines.load_until(lambda enough=enough: engines.failed >= enough)
            proxy.fault = None
            engines.settle()
        assert proxy.done[RESETS] >= 3


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_is_full_or_broken(directory, monkeypatch, fault):
    """The blobs that are there are still got; a full disk is no reason to give up on the tier,
    either."""

    def fail(*_: object) -> None:
        raise OSError(fault, "as told")

    store = DiskOptions(directory, 64 << 20)
    with in_process(store=store) as tier, fleet(tier.address, timeout_s=SAFETY_S) as engines:
        engines.load()
        engines.settle()
        assert engines.failed == 0, "the load alone does nothing wrong"
        landed = engines.landed
        with monkeypatch.context() as broken:
            broken.setattr(disk_medium, "_write_all", fail)
            engines.load_until(lambda: engines.failed >= HITS)
            assert engines.landed > landed
            if fault == errno.ENOSPC:
                assert all(engine.link.healthy for engine in engines.engines)
                assert engines.counters["put_TierExhaustedError"] >= HITS
        engines.settle()
        assert tier.call(tier.store.check_integrity) == []

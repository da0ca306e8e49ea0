"""Faults under load: nothing raises, no wrong byte lands, and every link recovers by itself.

Several links, each as an engine has one, put and get all the time while something is wrong. What is
counted as hit by a fault is one operation (a put or a get) that asked the tier and failed for it,
or a blob that arrived damaged; what the breaker refused without asking comes on top and does not
count. Every fault hits at least HITS operations.
"""

from __future__ import annotations

import errno
import functools
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from live_tier import LAYOUT, eventually, in_process, key_of, live_tier, payload_of
from tcp_proxy import tcp_proxy

from kvtier.tier.client import Blob, Landing, Offer, TierClient
from kvtier.tier.link.breaker import Breaker
from kvtier.tier.link.fetch import Fetch
from kvtier.tier.link.link import TierLink
from kvtier_tierd.stores.disk import medium as disk_medium
from kvtier_tierd.stores.disk.options import DiskOptions

HITS = 200
LINKS = 8
TIMEOUT_S = 0.15
BLOBS = 48
SIZES = {number: 500 + 811 * number for number in range(BLOBS)}
TRUTH = {number: payload_of(number, SIZES[number]) for number in range(BLOBS)}
ALL_BYTES = sum(SIZES.values())


class Engine:
    """One link under load.

    wrong:     what landed and was not what was put. lost: what the latest get found damaged.
    slowest_s: of all gets.
    """

    def __init__(self, address: str, seed: int, *, shared: bool, timeout_s: float) -> None:
        self.client = TierClient(address, timeout_s=timeout_s, shared=shared)
        self.link = TierLink(
            self.client, buffer_bytes=1 << 20, breaker=Breaker(first_s=0.05, longest_s=0.2)
        )
        self.chance = random.Random(seed)
        self.wrong: list[int] = []
        self.outcomes: Counter[Landing] = Counter()
        self.lost: list[int] = []
        self.slowest_s = 0.0
        self._fetches: list[Fetch[None]] = []

    def step(self) -> None:
        """A few puts and a get, unless more than enough are under way."""
        if self.link.pending > 12:
            return
        numbers = self.chance.sample(range(BLOBS), 6)
        self.link.put(
            [blob_of(number) for number in numbers[:2]], replace=self.chance.random() < 0.2
        )
        self._fetches.append(self.link.submit(lambda client: self.get(client, numbers)))

    def get(self, client: TierClient, numbers: list[int]) -> None:
        buffers: dict[int, bytearray] = {}

        def land(offer: Offer) -> memoryview:
            buffers[offer.position] = bytearray(offer.num_bytes)
            return memoryview(buffers[offer.position])

        began = time.monotonic()
        try:
            outcome = client.get([key_of(number) for number in numbers], land, ALL_BYTES)
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        self.outcomes.update(outcome)
        self.lost = [n for n, one in zip(numbers, outcome, strict=True) if one is Landing.CORRUPT]
        for position, (number, one) in enumerate(zip(numbers, outcome, strict=True)):
            if one is Landing.LANDED and buffers[position] != TRUTH[number]:
                self.wrong.append(number)

    @property
    def failed(self) -> int:
        """Operations that asked the tier and failed for it."""
        counters = dict(self.link.counters)
        return sum(
            number for name, number in counters.items()
            if name.startswith(("put_Tier", "get_Tier"))
        )  # fmt: skip

    def waits(self) -> bool:
        """Whether a get is still under way."""
        return not all(fetch.done for fetch in self._fetches)

    def works(self) -> bool:
        """Whether a put and a get go through."""
        self.link.put([blob_of(0)], replace=True)
        fetch = self.link.submit(lambda client: self.get(client, [0]))
        fetch.wait(5)
        before = self.outcomes[Landing.LANDED]
        fetch = self.link.submit(lambda client: self.get(client, [0]))
        return fetch.wait(5) and self.outcomes[Landing.LANDED] > before

    def settle(self) -> None:
        """The fault is over: everything has to be as if it had never been, without a restart."""
        eventually(lambda: self.link.healthy and self.works())
        assert self.link.flush(10)
        assert not self.waits()
        assert self.link.held_bytes == self.link.pending == 0
        assert self.wrong == []
        assert not [name for name in self.link.counters if name.endswith("_bugs")]


class Fleet:
    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines

    def load(self, seconds: float) -> None:
        """Steady load for a while."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for engine in self.engines:
                engine.step()
            time.sleep(0.001)

    def load_until_failed(self, wanted: int) -> None:
        """Load until so many operations have failed in all."""
        until = time.monotonic() + 15.0
        while self.failed < wanted:
            assert time.monotonic() < until, f"{self.failed} of {wanted}: {self.counters}"
            self.load(0.02)

    @property
    def failed(self) -> int:
        return sum(engine.failed for engine in self.engines)

    @property
    def counters(self) -> Counter[str]:
        return sum((Counter(engine.link.counters) for engine in self.engines), Counter())

    @property
    def outcomes(self) -> Counter[Landing]:
        return sum((engine.outcomes for engine in self.engines), Counter())

    def all_open(self) -> bool:
        return not any(engine.link.healthy for engine in self.engines)

    def all_closed(self) -> bool:
        return all(engine.link.healthy for engine in self.engines)

    def settle(self) -> None:
        for engine in self.engines:
            engine.settle()


@contextmanager
def fleet(
    address: str, *, shared: bool | None = None, timeout_s: float = TIMEOUT_S
) -> Iterator[Fleet]:
    """LINKS engines; half of them share memory where `shared` does not say."""
    engines = [
        Engine(address, seed, timeout_s=timeout_s,
               shared=seed % 2 == 0 if shared is None else shared)
        for seed in range(LINKS)
    ]  # fmt: skip
    try:
        yield Fleet(engines)
    finally:
        for engine in engines:
            engine.link.close()


@contextmanager
def alarm_clock() -> Iterator[Callable[[], float]]:
    """How late, in seconds and at worst, a thread of this process ran that had only to wake up:
    what a busy machine or a garbage collection adds to every wait."""
    ended, worst = threading.Event(), 0.0

    def tick() -> None:
        nonlocal worst
        began = time.monotonic()
        while not ended.wait(0.01):
            now = time.monotonic()
            worst, began = max(worst, now - began - 0.01), now

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield lambda: worst
    finally:
        ended.set()
        thread.join()


def blob_of(number: int) -> Blob:
    return Blob(key_of(number), LAYOUT, [TRUTH[number]])


def test_the_load_does_what_it_says(tmp_path, memory_directory):
    flags = ("--memory", "4m", "--shared-memory", str(memory_directory))
    with live_tier(tmp_path, *flags) as tier, fleet(tier.address, timeout_s=5.0) as engines:
        engines.load(0.5)
        engines.settle()
        assert engines.failed == 0
        assert engines.outcomes[Landing.LANDED] > 100
        assert [engine.client.shares_memory for engine in engines.engines] == [True, False] * 4


def test_kill_minus_nine(tmp_path, memory_directory):
    """In the middle of everything, and started again on the same port."""
    flags = ("--memory", "4m", "--shared-memory", str(memory_directory))
    with live_tier(tmp_path, *flags) as tier, fleet(tier.address) as engines:
        kills = 0
        while engines.failed < HITS:
            engines.load(0.2)
            before = engines.failed
            tier.kill()
            kills += 1
            engines.load_until_failed(before + LINKS)
            tier.start()
            engines.settle()
        assert kills >= 5
        assert engines.counters["refused_while_open"] > 0


def test_a_stopped_service(tmp_path, memory_directory):
    """SIGSTOP: connections stay and no answer comes. No call waits longer than its deadline."""
    flags = ("--memory", "4m", "--shared-memory", str(memory_directory))
    with (
        live_tier(tmp_path, *flags) as tier,
        fleet(tier.address) as engines,
        alarm_clock() as lateness,
    ):
        while engines.failed < HITS:
            engines.load(0.2)
            before, began = engines.failed, time.monotonic()
            tier.pause()
            engines.load_until_failed(before + LINKS)
            while not engines.all_open() and time.monotonic() - began < 5:
                engines.load(0.02)
            assert engines.all_open(), "after three failures no link asks any more"
            eventually(lambda: not any(engine.waits() for engine in engines.engines))
            tier.resume()
            engines.settle()
        allowed = engines.engines[0].client.deadline(ALL_BYTES).left()
        slowest = max(engine.slowest_s for engine in engines.engines)
        assert slowest < allowed + 1.0 + lateness(), "more than a scheduler's whim"


def test_flipped_bits_in_the_memory_of_the_service(memory_directory):
    """In 1 % of the blobs (and at least one) again and again, wherever they are."""
    chance = random.Random(0)
    everything = list(range(BLOBS))
    with in_process(shared_directory=memory_directory) as tier:
        with fleet(tier.address, timeout_s=10.0) as engines:
            engines.engines[0].link.put([blob_of(number) for number in everything])
            assert engines.engines[0].link.flush(10)
            for turn in itertools.cycle(engines.engines):
                if engines.outcomes[Landing.CORRUPT] >= HITS:
                    break
                flip(tier, chance, max(1, BLOBS // 100))
                corrupt = engines.outcomes[Landing.CORRUPT]
                fetch = turn.link.submit(functools.partial(turn.get, numbers=everything))
                assert fetch.wait(10)
                assert engines.outcomes[Landing.CORRUPT] > corrupt
                turn.link.put([blob_of(number) for number in turn.lost])
                assert turn.link.flush(10)
            engines.settle()
            assert engines.failed == 0
            assert tier.store.quarantined == engines.outcomes[Landing.CORRUPT]
            assert engines.outcomes[Landing.LANDED] > 10 * HITS
        assert tier.problems() == []


def flip(tier, chance: random.Random, blobs: int) -> None:
    """Flip one bit in the payloads of so many stored blobs."""

    def places() -> list[int]:
        stored = list(tier.store._blobs.values())
        return [
            one.offset + chance.randrange(one.info.num_bytes)
            for one in chance.sample(stored, blobs)
        ]

    with open(tier.server.service.shared.path, "r+b") as file:
        for place in tier.call(places):
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))


def test_connections_that_are_reset(tmp_path, memory_directory):
    flags = ("--memory", "4m", "--shared-memory", str(memory_directory))
    with (
        live_tier(tmp_path, *flags) as tier,
        tcp_proxy(tier.address) as proxy,
        fleet(proxy.address) as engines,
    ):
        while engines.failed < HITS:
            engines.load(0.15)
            proxy.reset()
        engines.settle()


def test_a_network_that_is_ten_times_slower(tmp_path):
    """Everything goes through, later."""
    with live_tier(tmp_path, "--memory", "4m") as tier, tcp_proxy(tier.address) as proxy:
        with TierClient(proxy.address, timeout_s=5.0, shared=False) as client:
            usual = roundtrip_s(client)
            # Once on the way there and once on the way back.
            proxy.delay_s = 5 * usual
            assert roundtrip_s(client) > 8 * usual
        with fleet(proxy.address, shared=False, timeout_s=10.0) as engines:
            while engines.outcomes.total() < HITS or engines.counters["put"] < HITS / 2:
                engines.load(0.05)
            assert engines.failed == 0
            engines.settle()


def roundtrip_s(client: TierClient) -> float:
    client.connect()
    began = time.monotonic()
    for _ in range(20):
        client.exists([key_of(0)])
    return (time.monotonic() - began) / 20


def test_a_network_that_is_slower_than_any_deadline(tmp_path):
    """A tier that is not there, until it is fast again."""
    with (
        live_tier(tmp_path, "--memory", "4m") as tier,
        tcp_proxy(tier.address) as proxy,
        fleet(proxy.address, shared=False) as engines,
    ):
        while engines.failed < HITS:
            engines.load(0.2)
            before = engines.failed
            proxy.delay_s = 2 * TIMEOUT_S
            engines.load_until_failed(before + LINKS)
            proxy.delay_s = 0.0
            engines.settle()


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_is_full_or_broken(tmp_path: Path, monkeypatch, fault):
    """What is there is still got; a full disk is no reason to give up on the tier, either."""
    options = {"store": DiskOptions(tmp_path / "disk", 64 << 20)}
    write_all = disk_medium._write_all

    def fail(*_: object) -> None:
        raise OSError(fault, "as told")

    with in_process(**options) as tier, fleet(tier.address, timeout_s=10.0) as engines:
        engines.load(0.3)
        engines.settle()
        landed = engines.outcomes[Landing.LANDED]
        monkeypatch.setattr(disk_medium, "_write_all", fail)
        engines.load_until_failed(HITS)
        assert engines.outcomes[Landing.LANDED] > landed
        if fault == errno.ENOSPC:
            assert engines.all_closed()
            assert engines.counters["put_TierExhaustedError"] >= HITS
        monkeypatch.setattr(disk_medium, "_write_all", write_all)
        engines.settle()
        assert tier.call(tier.store.check_integrity) == []

"""Several links under load, each as an engine has one, which put and get all the time.

What is counted as hit by a fault is one operation (a put or a get) that asked the tier and failed
for it, or a blob that arrived damaged; what the breaker refused without asking comes on top and
does not count.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from live_tier import LAYOUT, key_of, payload_of
from waiting import SAFETY_S, wait_for

from kvtier.tier.client import Blob, Landing, Offer, TierClient
from kvtier.tier.link.breaker import Breaker
from kvtier.tier.link.link import TierLink
from kvtier.tier.link.queues import Fetch

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

        outcome = client.get([key_of(number) for number in numbers], land, ALL_BYTES)
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
        """Return whether a get is still under way."""
        return not all(fetch.done for fetch in self._fetches)

    def works(self) -> bool:
        """Return whether a put and a get go through."""
        self.link.put([blob_of(0)], replace=True)
        fetch = self.link.submit(lambda client: self.get(client, [0]))
        fetch.wait(SAFETY_S)
        before = self.outcomes[Landing.LANDED]
        fetch = self.link.submit(lambda client: self.get(client, [0]))
        return fetch.wait(SAFETY_S) and self.outcomes[Landing.LANDED] > before

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

        wait_for(
            loaded, lambda: f"{self.failed} failed, {self.outcomes}: {self.counters}", poll_s=0.001
        )

    def load(self, landed: int) -> None:
        """Steady load until so many more blobs have landed."""
        wanted = self.outcomes[Landing.LANDED] + landed
        self.load_until(lambda: self.outcomes[Landing.LANDED] >= wanted)

    def load_until_failed(self, wanted: int) -> None:
        """Load until so many operations have failed in all."""
        self.load_until(lambda: self.failed >= wanted)

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


def blob_of(number: int) -> Blob:
    return Blob(key_of(number), LAYOUT, [TRUTH[number]])

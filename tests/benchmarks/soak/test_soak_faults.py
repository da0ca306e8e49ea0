"""The soak's faults of the tier, against a real one: they happen, are counted, and are over."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("grpc")

from tierd.live_tier import blob_of, fetch, in_process, key_of, payload_of
from waiting import wait_for

from benchmarks.common.processes import free_address
from benchmarks.soak import faults
from benchmarks.soak.clients import Engine
from benchmarks.soak.faults import (
    LEFT_BYTES,
    Damage,
    again_and_again,
    closing_s,
    fill,
    full_disk,
    small_disk,
    then_well,
)
from benchmarks.soak.models import EVERYTHING
from benchmarks.soak.proxy import FLIPS, SLOW, Proxy
from kvtier.errors import TierError
from kvtier.tier.client import Landing, TierClient

# Enough for a piece that may be damaged.
BLOB_BYTES, BLOBS = 100_000, 10
DEADLINE_S = 20.0


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    socket = tmp_path / "tier.sock"
    with in_process(listen=f"unix:{socket}", insecure_local=False):
        yield Proxy(free_address(), socket, random.Random(1))


def behind(proxy: Proxy, work: Callable[[TierClient], None]) -> None:
    """Work with a client whose payloads all come through the proxy."""

    async def run() -> None:
        async with proxy.forwarding():
            with TierClient(proxy.listen, timeout_s=DEADLINE_S, shared=False) as client:
                await asyncio.to_thread(work, client)

    asyncio.run(run())


def stored(client: TierClient, number: int) -> bool:
    """Put a blob; returns whether that went well."""
    try:
        client.connect()
        client.put(blob_of(number, BLOB_BYTES), replace=True)
    except TierError:
        return False
    return True


def test_flipped_bits_are_found_by_who_reads_whichever_way_the_blob_went(proxy: Proxy) -> None:
    sound, damaged = range(BLOBS), range(BLOBS, 2 * BLOBS)
    found: list[Landing] = []

    def read(client: TierClient, numbers: range) -> list[Landing]:
        """Return what comes of a get; what lands is what was put."""
        try:
            outcome, landed = fetch(client, [key_of(number) for number in numbers])
        except TierError:
            return []
        for position, data in landed.items():
            assert data == payload_of(numbers[position], BLOB_BYTES)
        return outcome

    def work(client: TierClient) -> None:
        for number in sound:
            wait_for(lambda number=number: stored(client, number))
        proxy.fault = FLIPS
        while found.count(Landing.CORRUPT) < 3:
            found.extend(read(client, sound))
        assert proxy.done[FLIPS] >= 3
        for number in damaged:
            wait_for(lambda number=number: stored(client, number))
        proxy.fault = None
        assert Landing.CORRUPT in wait_for(lambda: read(client, damaged))
        # The service was told, and has taken them out.
        assert set(read(client, damaged)) <= {Landing.LANDED, Landing.MISSING}
        assert set(read(client, sound)) == {Landing.LANDED}

    behind(proxy, work)


def test_slow_calls_are_answered_and_counted(proxy: Proxy) -> None:
    def work(client: TierClient) -> None:
        wait_for(lambda: stored(client, 1))
        assert proxy.done[SLOW] == 0
        proxy.fault = SLOW
        assert client.exists([key_of(1)]).present == [True]
        assert proxy.done[SLOW] >= 2
        proxy.fault = None

    behind(proxy, work)


def test_a_disk_is_full_until_another_program_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "ILL_S", 0.0)
    disk = tmp_path / "disk"
    with small_disk(disk, 1 << 20) as mounted:
        if not mounted:
            pytest.skip("it takes the right to mount a file system")
        fill(disk / "neighbour")
        assert shutil.disk_usage(disk).free <= LEFT_BYTES + 4096
        assert asyncio.run(full_disk(disk, random.Random(1))) == 1
        assert not list(disk.iterdir())
    assert not disk.is_mount()


class Telling:
    """A server whose breaker is open in its first `opened` states."""

    def __init__(self, opened: int) -> None:
        self.opened = opened

    async def state(self) -> dict:
        self.opened -= 1
        return {"tier": {"healthy": self.opened < 0}}


def test_a_fault_of_the_tier_is_over_when_every_engine_has_found_it_well_again() -> None:
    async def run() -> tuple[Damage, list[float | None]]:
        engines = [
            Engine(name, Telling(opened), EVERYTHING) for name, opened in (("A", 0), ("B", 2))
        ]
        damage, alone, stopping = Damage(), asyncio.Lock(), asyncio.Event()

        async def fault() -> int:
            assert alone.locked()
            stopping.set()
            return 3

        times = await then_well("a fault", fault, alone, engines, damage)
        damage.done["a fault"] += times
        # It was told to stop: there is no other one.
        await again_and_again("bit flips", random.Random(1), stopping, damage, fault)
        async with engines[0].gate.closed():
            return damage, [await closing_s(engines[0])]

    damage, while_closed = asyncio.run(run())
    assert damage.done == {"a fault": 3, "bit flips": 0}
    at_once, later = damage.closing_s["a fault"]
    assert at_once < later
    assert while_closed == [None]

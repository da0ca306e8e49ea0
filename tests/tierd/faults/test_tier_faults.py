"""Faults under load: nothing raises, no wrong byte lands, and every link recovers by itself.

The links of fleet.py are under load while something is wrong. Every fault hits at least HITS of
their operations.
"""

from __future__ import annotations

import errno
import functools
import itertools
import random
from pathlib import Path

import pytest
from fleet import BLOBS, HITS, LINKS, TIMEOUT_S, blob_of, fleet
from live_tier import in_process, live_tier
from tcp_proxy import tcp_proxy
from waiting import SAFETY_S, wait_for

from kvtier.tier.client import Landing
from kvtier_tierd.stores.disk import medium as disk_medium
from kvtier_tierd.stores.disk.store import DiskOptions

# Blobs that land between two faults.
SOME = 40


def test_the_load_does_what_it_says(tmp_path, memory_directory):
    flags = ("--memory", "4m", "--shared-memory", str(memory_directory))
    with live_tier(tmp_path, *flags) as tier, fleet(tier.address, timeout_s=SAFETY_S) as engines:
        engines.load(100)
        engines.settle()
        assert engines.failed == 0
        assert [engine.client.shares_memory for engine in engines.engines] == [True, False] * 4


def test_kill_minus_nine(tmp_path, memory_directory):
    """The service is killed in the middle of everything, and started again on the same port."""
    flags = ("--memory", "4m", "--shared-memory", str(memory_directory))
    with live_tier(tmp_path, *flags) as tier, fleet(tier.address) as engines:
        kills = 0
        while engines.failed < HITS:
            engines.load(SOME)
            before = engines.failed
            tier.kill()
            kills += 1
            engines.load_until_failed(before + LINKS)
            tier.start()
            engines.settle()
        assert kills >= 5
        assert engines.counters["refused_while_open"] > 0


def test_a_stopped_service(tmp_path, memory_directory):
    """SIGSTOP: connections stay and no answer comes. Every call ends all the same."""
    flags = ("--memory", "4m", "--shared-memory", str(memory_directory))
    with live_tier(tmp_path, *flags) as tier, fleet(tier.address) as engines:
        while engines.failed < HITS:
            engines.load(SOME)
            before = engines.failed
            tier.pause()
            engines.load_until_failed(before + LINKS)
            # After three failures no link asks any more.
            engines.load_until(engines.all_open)
            wait_for(lambda: not any(engine.waits() for engine in engines.engines))
            tier.resume()
            engines.settle()


def test_flipped_bits_in_the_memory_of_the_service(memory_directory):
    """The bits are in 1 % of the blobs (and at least one) again and again, wherever they are."""
    chance = random.Random(0)
    everything = list(range(BLOBS))
    with in_process(shared_directory=memory_directory) as tier:
        with fleet(tier.address, timeout_s=SAFETY_S) as engines:
            engines.engines[0].link.put([blob_of(number) for number in everything])
            assert engines.engines[0].link.flush(SAFETY_S)
            for turn in itertools.cycle(engines.engines):
                if engines.outcomes[Landing.CORRUPT] >= HITS:
                    break
                flip(tier, chance, max(1, BLOBS // 100))
                corrupt = engines.outcomes[Landing.CORRUPT]
                fetch = turn.link.submit(functools.partial(turn.get, numbers=everything))
                assert fetch.wait(SAFETY_S)
                assert engines.outcomes[Landing.CORRUPT] > corrupt
                turn.link.put([blob_of(number) for number in turn.lost])
                assert turn.link.flush(SAFETY_S)
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
            engines.load(SOME)
            proxy.reset()
        engines.settle()


def test_a_network_that_is_slower_than_any_deadline(tmp_path):
    """A tier that is not there, until it is fast again."""
    with (
        live_tier(tmp_path, "--memory", "4m") as tier,
        tcp_proxy(tier.address) as proxy,
        fleet(proxy.address, shared=False) as engines,
    ):
        while engines.failed < HITS:
            engines.load(SOME)
            before = engines.failed
            proxy.delay_s = 2 * TIMEOUT_S
            engines.load_until_failed(before + LINKS)
            proxy.delay_s = 0.0
            engines.settle()


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_is_full_or_broken(tmp_path: Path, monkeypatch, fault):
    """The blobs that are there are still got; a full disk is no reason to give up on the tier,
    either."""
    options = {"store": DiskOptions(tmp_path / "disk", 64 << 20)}
    write_all = disk_medium._write_all

    def fail(*_: object) -> None:
        raise OSError(fault, "as told")

    with in_process(**options) as tier, fleet(tier.address, timeout_s=SAFETY_S) as engines:
        engines.load(SOME)
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

"""Tier services over one mooncake_master, as users run them: what all see, and what dies with one.

What the tests hold them to, with the master dropping a silent segment after CLIENT_TTL_S seconds
(its default is 10):

    one is killed      what it held: misses, never an error, never other bytes. As soon as one
                       service has missed some of it, it says that it has none of it, and stores it
                       anew. What others held, and puts elsewhere: as before
    it comes back      empty, at its address, and is part of it at once
    one hangs          what it has is a miss; the others go on
    the master is      misses, and puts fail naming it; all is well when it is back
    away
"""

from __future__ import annotations

import random
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from live_server import free_port, listens
from live_tier import (
    LAYOUT,
    InProcessTier,
    LiveTier,
    blob_of,
    fetch,
    in_process,
    key_of,
    live_tier,
    payload_of,
)
from mooncake_master import MIB, MooncakeMaster, options_of
from waiting import SAFETY_S, FakeClock, wait_for

from kvtier.errors import TierError, TierExhaustedError, TierUnavailableError
from kvtier.tier.client import Blob, Landing, TierClient
from kvtier_tierd.stores.base import BlobName
from kvtier_tierd.stores.mooncake import segments as mooncake_segments
from kvtier_tierd.stores.mooncake.store import MooncakeStore

pytestmark = pytest.mark.usefixtures("mooncake")

SIZES = (1, 4095, 4096, MIB - 1, MIB, MIB + 1, 5 * MIB + 3)
NOWHERE = "127.0.0.1:1"
FLAGS = ("--mooncake-segment", "16m", "--mooncake-buffer", "32m")


class Services(NamedTuple):
    """Two services in the same cache: a process that may be killed, and one in this process; a
    patient client of each."""

    first: LiveTier
    one: TierClient
    second: InProcessTier
    other: TierClient


@contextmanager
def services(
    master: MooncakeMaster, folder: Path, *flags: str, **options: object
) -> Iterator[Services]:
    """flags: of the first one; options: of the second."""
    common = ("--store", "mooncake", "--mooncake-master", master.address, *FLAGS, *flags)
    given = options_of(master, "kvtier", **{"buffer_bytes": 32 * MIB} | options)
    with (
        live_tier(folder, *common) as first,
        in_process(store=given) as second,
        TierClient(first.address, timeout_s=SAFETY_S) as one,
        TierClient(second.address, timeout_s=SAFETY_S) as other,
    ):
        assert one.connect().store == other.connect().store == "mooncake"
        yield Services(first, one, second, other)


def get(client: TierClient, number: int, num_bytes: int = MIB) -> bool:
    """Return whether it was there, in which case it was right."""
    (outcome,), landed = fetch(client, [key_of(number)], num_bytes)
    assert outcome in (Landing.LANDED, Landing.MISSING)
    assert landed == ({0: payload_of(number, num_bytes)} if outcome is Landing.LANDED else {})
    return outcome is Landing.LANDED


def puts(client: TierClient, number: int) -> bool:
    """Return whether a put works, which may fail as the interface allows only."""
    with suppress(TierUnavailableError, TierExhaustedError):
        client.put(blob_of(number, MIB))
        return True
    return False


def held(client: TierClient, numbers: Sequence[int]) -> list[int]:
    present = client.exists([key_of(number) for number in numbers]).present
    return [number for number, there in zip(numbers, present, strict=True) if there]


def reached(client: TierClient) -> bool:
    """gRPC waits a while before it looks again for who was not there."""
    try:
        client.connect()
    except TierUnavailableError:
        return False
    return True


@pytest.fixture
def numbers() -> int:
    """Blobs that no other test over this master has put; ten thousand of them."""
    return random.Random().randrange(1, 1 << 40) * 10_000


# ---- two services


def test_what_one_service_stored_the_other_serves_to_the_bit(master, tmp_path, numbers):
    with services(master, tmp_path) as (_, one, _, other):
        for place, num_bytes in enumerate(SIZES):
            writer, reader = (one, other) if place % 2 else (other, one)
            number = numbers + place
            assert not held(reader, [number])
            assert writer.put(blob_of(number, num_bytes))
            assert not reader.put(blob_of(number, num_bytes)), "it has it already"
            assert get(reader, number, num_bytes)
            assert get(writer, number, num_bytes)
        first = payload_of(numbers, 3 * MIB)
        pieces = Blob(key_of(numbers + 99), LAYOUT, [first[:5], first[5:MIB], first[MIB:]])
        assert one.put(pieces)
        assert fetch(other, [pieces.key], 3 * MIB)[1] == {0: first}
        assert other.delete([pieces.key]) == 1
        assert not one.exists([pieces.key]).present[0]


def test_two_that_put_the_same_blob_at_a_time_both_succeed(tmp_path, numbers):
    """They know each other by the master's HTTP metadata server, which does as well."""
    with MooncakeMaster("--enable_http_metadata_server=true") as alone, ExitStack() as stack:
        flags = ("--mooncake-metadata", alone.metadata, "--mooncake-segment", "64m")
        options = {"metadata": alone.metadata, "segment_bytes": 64 * MIB}
        _, one, _, other = stack.enter_context(services(alone, tmp_path, *flags, **options))
        both = stack.enter_context(ThreadPoolExecutor(2))
        meet = threading.Barrier(2, timeout=SAFETY_S)

        def put(client, number):
            blob = blob_of(number, 4 * MIB)
            meet.wait()
            return client.put(blob, replace=True)

        for number in range(numbers, numbers + 12):
            assert list(both.map(put, (one, other), (number, number))) == [True, True]
            assert get(one, number, 4 * MIB)
            assert get(other, number, 4 * MIB)


# ---- one of them dies or hangs


def test_a_service_that_is_killed_costs_what_it_held_and_comes_back(master, tmp_path, numbers):
    lost, kept, fresh = (range(numbers + at, numbers + at + 8) for at in (0, 10, 20))
    with services(master, tmp_path) as (first, one, second, other):
        for mine, yours in zip(lost, kept, strict=True):
            assert one.put(blob_of(mine, MIB))
            assert other.put(blob_of(yours, MIB))
        assert all(get(other, number) for number in (*lost, *kept))
        dropped = master.dropped()
        first.kill()
        with TierClient(second.address) as impatient:
            keys = [key_of(number) for number in (*lost, *kept)]
            outcomes, landed = fetch(impatient, keys, 8 * MIB)
        assert outcomes == [Landing.MISSING] * 8 + [Landing.LANDED] * 8
        assert landed == {8 + i: payload_of(number, MIB) for i, number in enumerate(kept)}
        assert held(other, (*lost, *kept)) == [*kept]
        assert other.put(blob_of(lost[0], MIB)), "no service has it any more, so it is stored"
        for number in fresh[:4]:
            assert other.put(blob_of(number, MIB))
        assert all(get(other, number) for number in (lost[0], *fresh[:4]))
        with pytest.raises(TierUnavailableError):
            one.put(blob_of(numbers + 30, MIB))
        wait_for(lambda: master.dropped() > dropped)
        assert held(other, (*lost, *kept)) == [lost[0], *kept], "what the dead one has is dropped"

        gone = [*lost[1:]]
        for at in (40, 50):
            first.start()
            wait_for(lambda: reached(one))
            assert all(get(one, number) for number in (*kept, *fresh[:4], lost[0]))
            assert not any(get(one, number) or get(other, number) for number in gone)
            for number in range(numbers + at, numbers + at + 3):
                assert one.put(blob_of(number, MIB))
                assert get(other, number)
                gone.append(number)
            if at == 40:
                # It is back before the master has noticed: where its bytes were is something else.
                first.kill()
        assert first.terminate() == 0
        assert not any(get(other, number) for number in gone), "its segment went with it"


def test_a_segment_that_could_not_be_read_is_asked_again_after_a_while(
    master, tmp_path, numbers, monkeypatch
):
    async def never(address: str) -> bool:
        return False

    pair = (numbers, numbers + 1)
    with services(master, tmp_path) as (_, one, second, other):
        for number in pair:
            assert one.put(blob_of(number, MIB))
        store, clock = second.store, FakeClock()
        key = store._key(BlobName("default", key_of(numbers)))
        second.run(store._silent.note(key))
        assert held(other, pair) == [*pair], "its process is there"
        monkeypatch.setattr(mooncake_segments, "time", clock)
        monkeypatch.setattr(mooncake_segments, "listens", never)
        second.run(store._silent.note(key))
        assert held(other, pair) == []
        assert not get(other, numbers + 1)
        clock.now += mooncake_segments.SILENT_S
        assert held(other, pair) == [*pair]
        assert get(other, numbers + 1)


# The puts before the kill could go to segments that other tests have left behind, so there are
# none.
def test_puts_that_went_to_a_killed_process_work_again(tmp_path, numbers):
    flags, options = ("--mooncake-segment", "64m"), {"capacity_bytes": 256 * MIB}
    with (
        MooncakeMaster() as alone,
        services(alone, tmp_path, *flags, **options) as (first, one, _, other),
    ):
        # Its own segment is full: the next ones go to the other's.
        before, after = range(numbers, numbers + 24), range(numbers + 100, numbers + 110)
        for number in before:
            assert other.put(blob_of(number, MIB))
        assert get(one, before[-1])
        first.kill()
        for number in after:
            wait_for(lambda number=number: puts(other, number))
            assert get(other, number)
        for number in before:
            get(other, number)


def test_with_two_replicas_a_blob_outlives_either_process(tmp_path, numbers):
    with (
        MooncakeMaster() as alone,
        services(alone, tmp_path, "--mooncake-replicas", "2", replicas=2) as (first, _, _, other),
    ):
        assert other.put(blob_of(numbers, MIB))
        first.kill()
        wait_for(lambda: get(other, numbers))


def test_a_process_that_hangs_costs_one_timeout_and_the_others_nothing(master, tmp_path, numbers):
    with services(master, tmp_path) as (first, one, _, other):
        assert one.put(blob_of(numbers, MIB))
        assert other.put(blob_of(numbers + 1, MIB))
        first.pause()
        assert not get(other, numbers)
        wait_for(lambda: puts(other, numbers + 2))
        assert get(other, numbers + 1)


class Traffic(threading.Thread):
    """Puts and gets of the same few blobs through one service until it is `over`.

    strict: whether an error of the service is one of the test; else it may be away.
    landed, stored, answered: how often.
    """

    def __init__(self, client: TierClient, numbers: Sequence[int], *, strict: bool) -> None:
        super().__init__(name="traffic")
        self.client, self.numbers, self.strict = client, numbers, strict
        self.landed = self.stored = self.answered = 0
        self.over, self.error = threading.Event(), None
        self.start()

    def goes_on(self) -> None:
        """Wait until 20 more calls were answered."""
        wanted = self.answered + 20
        wait_for(lambda: self.answered >= wanted or self.error)

    def run(self) -> None:
        chance = random.Random(self.numbers[0])
        while not self.over.wait(0.01) and self.error is None:
            number = chance.choice(self.numbers)
            try:
                if chance.random() < 0.4:
                    self.stored += self.client.put(blob_of(number, MIB))
                else:
                    self.landed += get(self.client, number)
                self.answered += 1
            except BaseException as error:
                if self.strict or not isinstance(error, TierError):
                    self.error = error


def test_kills_under_traffic_are_errors_to_no_other_client(master, tmp_path, numbers):
    shared = range(numbers, numbers + 6)
    with services(master, tmp_path) as (first, one, _, other), ExitStack() as ending:
        traffic = [Traffic(one, shared, strict=False), Traffic(other, shared, strict=True)]
        for each in traffic:
            ending.callback(each.join)
            ending.callback(each.over.set)
        killed, spared = traffic
        for away in ("a while", "until it is dropped", "a moment"):
            killed.goes_on()
            spared.goes_on()
            dropped = master.dropped()
            first.kill()
            if away == "a while":
                spared.goes_on()
            elif away == "until it is dropped":
                wait_for(lambda before=dropped: master.dropped() > before)
            first.start()
            spared.goes_on()
        ending.close()
        assert [each.error for each in traffic] == [None, None]
        assert all(each.landed and each.stored for each in traffic)


# ---- the master


@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_without_the_master_services_serve_misses_and_go_on_when_it_is_back(tmp_path, numbers, how):
    with MooncakeMaster() as alone, services(alone, tmp_path) as (_, one, second, other):
        for number in (numbers, numbers + 1):
            assert other.put(blob_of(number, MIB))
        spoilt = BlobName("default", key_of(numbers + 1))
        with ExitStack() as away:
            if how == "killed":
                alone.stop()
                away.callback(alone.start)
            else:
                away.enter_context(alone.hanging())
            # A master that hangs for long drops its segments.
            for client in (one, other) if how == "killed" else (other,):
                with pytest.raises(TierUnavailableError, match=alone.address):
                    client.put(blob_of(numbers + 2, MIB), replace=True)
                assert not get(client, numbers)
                assert not held(client, [numbers])
            with pytest.raises(TierUnavailableError, match=alone.address):
                second.run(second.store.quarantine(spoilt))

        def stored() -> bool:
            try:
                return one.put(blob_of(numbers + 3, MIB)) or get(other, numbers + 3)
            except TierError:  # away, or there and without segments yet
                return False

        wait_for(stored)
        wait_for(lambda: get(other, numbers + 3))
        # A master that hung still has what it could not be told to forget.
        assert get(other, numbers) == (how == "hangs")
        assert not held(other, [numbers + 1])
        assert not get(other, numbers + 1)
        assert other.put(blob_of(numbers + 1, MIB))
        assert get(other, numbers + 1)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"master": NOWHERE}, TierUnavailableError, f"--mooncake-master {NOWHERE}"),
        ({"metadata": f"http://{NOWHERE}/m"}, TierUnavailableError, "--mooncake-metadata http"),
        ({"segment_bytes": 1 << 50}, TierExhaustedError, "--mooncake-segment"),
    ],
)
async def test_what_a_service_cannot_start_with_is_named(master, changes, error, named):
    store = MooncakeStore(replace(options_of(master), **changes))
    with pytest.raises(error, match=named):
        await store.start()
    await store.close()


async def test_another_process_that_listens_there_is_no_master(master):
    with socket.create_server(("127.0.0.1", 0)) as another:
        address = f"127.0.0.1:{another.getsockname()[1]}"
        store = MooncakeStore(replace(options_of(master), master=address, timeout_s=0.5))
        with pytest.raises(TierUnavailableError, match=address):
            await store.start()
        await store.close()


async def test_closing_without_a_master_ends():
    with MooncakeMaster() as alone:
        store = MooncakeStore(options_of(alone))
        await store.start()
        alone.stop()
        await store.close()


def test_the_commands_of_the_docs_make_one_cache_of_two_services(tmp_path, numbers):
    page = (Path(__file__).resolve().parents[3] / "docs" / "tier.md").read_text()
    (master,) = re.findall(r"^mooncake_master .*--rpc_port=50051.*", page, re.MULTILINE)
    (tier,) = re.findall(r"^kvtier tier (.*--store mooncake .*)", page, re.MULTILINE)
    port = str(free_port())
    name, *flags = shlex.split(master.replace("50051", port))
    # Less memory than it says, and beside the masters of other tests.
    command = [Path(sys.executable).with_name(name), *flags, f"--metrics_port={free_port()}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: listens("127.0.0.1", int(port)))
            given = (*shlex.split(tier.replace("50051", port)), *FLAGS)
            with ExitStack() as stack:
                one, other = (
                    stack.enter_context(TierClient(service.address, timeout_s=SAFETY_S))
                    for service in (stack.enter_context(live_tier(tmp_path, *given)) for _ in "ab")
                )
                assert one.put(blob_of(numbers, MIB))
                assert get(other, numbers)
        finally:
            process.kill()

"""Tier services over one mooncake_master, as users run them: real processes, real clients.

What the tests hold them to when one is killed, with the master dropping a silent segment after
CLIENT_TTL_S seconds (its default is 10):

    what it held       misses, never an error, never other
                       bytes. As soon as one service has missed some of it, it says that it has
                       none of it, and stores it anew
    what others held   as before
    puts elsewhere     as before, where their own segment has room
    it comes back      empty, at its address, and is part of it at once
"""

from __future__ import annotations

import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from live_tier import LAYOUT, LiveTier, blob_of, fetch, key_of, live_tier, payload_of
from mooncake_master import MIB, MooncakeMaster, free_ports
from waiting import SAFETY_S, wait_for

from kvtier.errors import TierError, TierUnavailableError
from kvtier.tier.client import Blob, Landing, TierClient

pytestmark = pytest.mark.usefixtures("mooncake")

SIZES = (1, 4095, 4096, MIB - 1, MIB, MIB + 1, 5 * MIB + 3)
HALF_PUT_S = 30  # for which the master waits for who was killed in the middle of a put
FLAGS = ("--mooncake-segment", "16m", "--mooncake-buffer", "32m")


@contextmanager
def services(
    master: MooncakeMaster, directory: Path, count: int = 2, flags: Sequence[str] = FLAGS
) -> Iterator[list[tuple[LiveTier, TierClient]]]:
    """Start so many services in the same cache, and a client of each, patient."""
    with ExitStack() as stack:
        started = []
        for number in range(count):
            folder = directory / str(number)
            folder.mkdir()
            common = ("--store", "mooncake", "--mooncake-master", master.address, *flags)
            tier = stack.enter_context(live_tier(folder, *common))
            client = stack.enter_context(TierClient(tier.address, timeout_s=SAFETY_S))
            assert client.connect().store == "mooncake"
            started.append((tier, client))
        yield started


def get(client: TierClient, number: int, num_bytes: int = MIB) -> bool:
    """Return whether it was there, in which case it was right."""
    (outcome,), landed = fetch(client, [key_of(number)], num_bytes)
    assert outcome in (Landing.LANDED, Landing.MISSING)
    assert landed == ({0: payload_of(number, num_bytes)} if outcome is Landing.LANDED else {})
    return outcome is Landing.LANDED


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
def numbers() -> Iterator[int]:
    """Blobs that no other test over this master has put; ten thousand of them."""
    return random.Random().randrange(1, 1 << 40) * 10_000


def test_what_one_service_stored_the_other_serves_to_the_bit(master, tmp_path, numbers):
    with services(master, tmp_path) as ((_, one), (_, other)):
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


def test_a_service_that_is_killed_costs_what_it_held_and_comes_back(master, tmp_path, numbers):
    lost, kept, fresh = (range(numbers + at, numbers + at + 8) for at in (0, 10, 20))
    with services(master, tmp_path) as ((first, one), (second, other)):
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

        first.start()
        wait_for(lambda: reached(one))
        assert all(get(one, number) for number in (*kept, *fresh[:4], lost[0]))
        assert not any(get(one, number) for number in lost[1:])
        assert one.put(blob_of(lost[1], MIB))
        assert get(other, lost[1])
        assert first.terminate() == 0
        assert not any(get(other, number) for number in lost[1:]), "its segment went with it"


def test_a_service_that_is_back_before_the_master_noticed_serves_nothing_wrong(
    master, tmp_path, numbers
):
    with services(master, tmp_path) as ((first, one), (_, other)):
        for again in range(4):
            began = range(numbers + 10 * again, numbers + 10 * again + 3)
            for number in began:
                assert one.put(blob_of(number, MIB))
                assert get(other, number)
            first.kill()
            first.start()
            wait_for(lambda: reached(one))
            # Whatever is now where its bytes were, both say that they have none of them.
            for number in began:
                assert not get(other, number)
                assert not get(one, number)
            number = numbers + 10 * again + 5
            assert one.put(blob_of(number, MIB))
            assert get(other, number)


class Traffic:
    """Puts and gets of the same few blobs through one service until told to end.

    strict: whether an error of the service is one of the test; else it may be away.
    landed, stored: how often; errors: what must not have been.
    """

    def __init__(self, client: TierClient, numbers: Sequence[int], *, strict: bool) -> None:
        self.client, self.numbers, self.strict = client, numbers, strict
        self.landed = self.stored = self.answered = 0
        self.errors: list[BaseException] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traffic")

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def goes_on(self, calls: int) -> None:
        """Wait until so many more calls were answered."""
        wanted = self.answered + calls
        wait_for(lambda: self.answered >= wanted or self.errors)

    def _run(self) -> None:
        chance = random.Random(self.numbers[0])
        while not self._ended.is_set():
            number = chance.choice(self.numbers)
            try:
                self._ended.wait(0.01)
                if chance.random() < 0.4:
                    self.stored += self.client.put(blob_of(number, MIB))
                else:
                    self.landed += get(self.client, number)
                self.answered += 1
            except TierError as error:
                if self.strict:
                    self.errors.append(error)
                self._ended.wait(0.05)
            except BaseException as error:
                self.errors.append(error)
                return


def test_kills_under_traffic_are_errors_to_no_other_client(master, tmp_path, numbers):
    shared = range(numbers, numbers + 6)
    with services(master, tmp_path) as ((first, one), (_, other)):
        with (
            Traffic(one, shared, strict=False) as killed,
            Traffic(other, shared, strict=True) as spared,
        ):
            for away in ("a while", "until it is dropped", "a moment"):
                killed.goes_on(20)
                spared.goes_on(20)
                dropped = master.dropped()
                first.kill()
                if away == "a while":
                    spared.goes_on(20)
                elif away == "until it is dropped":
                    wait_for(lambda before=dropped: master.dropped() > before)
                first.start()
                spared.goes_on(20)
        assert [*killed.errors, *spared.errors] == []
        assert min(spared.landed, spared.stored, killed.landed, killed.stored) > 0

        def stored_again(number: int) -> bool:
            other.put(blob_of(number, MIB))
            # A connection to the service that died may still wait before it is tried again.
            with suppress(TierUnavailableError):
                return get(one, number) and get(other, number)
            return False

        for number in (numbers + 100, *shared):
            wait_for(lambda number=number: stored_again(number))
        assert first.terminate() == 0


def test_the_commands_of_the_docs_make_one_cache_of_two_services(tmp_path, numbers):
    page = (Path(__file__).resolve().parents[3] / "docs" / "tier.md").read_text()
    (master,) = re.findall(r"^mooncake_master .*--rpc_port=50051.*", page, re.MULTILINE)
    (tier,) = re.findall(r"^kvtier tier (.*--store mooncake .*)", page, re.MULTILINE)
    port = str(free_ports(1)[0])
    name, *flags = shlex.split(master.replace("50051", port))
    # Less memory than it says, and beside the masters of other tests.
    command = [Path(sys.executable).with_name(name), *flags, f"--metrics_port={free_ports(1)[0]}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: connects(int(port)))
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


def connects(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def test_without_the_master_services_serve_misses_and_go_on_when_it_is_back(tmp_path, numbers):
    with MooncakeMaster() as master, services(master, tmp_path) as ((_, one), (_, other)):
        assert one.put(blob_of(numbers, MIB))
        master.signal(signal.SIGKILL)
        with pytest.raises(TierUnavailableError, match=master.address):
            one.put(blob_of(numbers + 1, MIB))
        for client in (one, other):
            # The first to ask waits for the answer that does not come.
            fetch(client, [key_of(numbers)])
            assert not get(client, numbers)
            assert not held(client, [numbers])
        master.start()

        def stored() -> bool:
            try:
                return one.put(blob_of(numbers + 2, MIB)) or get(other, numbers + 2)
            except TierError:  # away, or there and without segments yet
                return False

        wait_for(stored)
        wait_for(lambda: get(other, numbers + 2))

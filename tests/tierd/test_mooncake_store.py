"""The distributed store, on a real mooncake_master: what all services see, and what dies with one.

Times that the tests hold it to, with the master dropping a silent segment after CLIENT_TTL_S
seconds (its default is 10) and TIMEOUT_S seconds for one call:

    a peer is killed      its blobs are misses, the first one or two in TIMEOUT_S, the others at
                          once; puts that go to it work again within CLIENT_TTL_S + 8 s
    a peer hangs          one read in TIMEOUT_S + 0.5 s is a miss; the others go on
    the master is gone    the first call in TIMEOUT_S + 0.5 s, then at once; back in 15 s;
                          closing in 20 s, most of which the C++ client keeps the GIL
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from mooncake_master import CLIENT_TTL_S, MIB, MooncakeMaster, MooncakePeer, free_ports
from store_contract import (
    SIZE,
    StoreContract,
    blob_name,
    content,
    get,
    held,
    info_of,
    payload_of,
    put,
    reserve,
)

from kvtier.errors import TierExhaustedError, TierUnavailableError
from kvtier_tierd.stores import mooncake_segments
from kvtier_tierd.stores.mooncake import MooncakeStore, trailer
from kvtier_tierd.stores.mooncake_link import MooncakeLink, MooncakeOptions

pytestmark = pytest.mark.usefixtures("mooncake")

TIMEOUT_S = 2.0
SEGMENT = 16 * MIB
prefixes = (f"test-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def master(mooncake) -> Iterator[MooncakeMaster]:
    with MooncakeMaster() as one:
        yield one


def options_of(master: MooncakeMaster, prefix: str = "", **others: Any) -> MooncakeOptions:
    """Of a small service; with a prefix of its own unless it is to share one."""
    given = {"segment_bytes": SEGMENT, "buffer_bytes": 64 * MIB, "timeout_s": TIMEOUT_S} | others
    return MooncakeOptions(master=master.address, prefix=prefix or next(prefixes), **given)


@asynccontextmanager
async def opened(options: MooncakeOptions, quotas: Any = None) -> Any:
    store = MooncakeStore(options, quotas)
    try:
        await store.start()
        yield store
        assert store.check_integrity() == []
    finally:
        await store.close()


def play(options: MooncakeOptions, scenario: Callable[[MooncakeStore], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with opened(options) as store:
            return await scenario(store)

    return asyncio.run(run())


@contextmanager
def within(seconds: float) -> Iterator[None]:
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    assert took < seconds, f"took {took:.2f} s"


async def until(seconds: float, succeeds: Callable[[], Awaitable[bool]]) -> float:
    """Seconds that it took."""
    begin = time.monotonic()
    while not await succeeds():
        assert time.monotonic() - begin < seconds, "it never did"
        await asyncio.sleep(0.1)
    return time.monotonic() - begin


async def puts(store: MooncakeStore, number: int, num_bytes: int = MIB) -> bool:
    """Whether a put works, which may fail as the interface allows only."""
    try:
        await put(store, blob_name(number), payload_of(number, num_bytes))
    except (TierUnavailableError, TierExhaustedError):
        return False
    return True


# ---- what every store does


@pytest.fixture(scope="module")
def link(master) -> Iterator[MooncakeLink]:
    """One client for all the stores of the contract: mounting a segment anew takes seconds."""
    link = MooncakeLink(options_of(master, segment_bytes=64 * MIB))
    asyncio.run(link.start())
    yield link
    asyncio.run(link.close())


class TestMooncakeStoreContract(StoreContract):
    @pytest.fixture(autouse=True)
    def _connected(self, link):
        self.link = link

    def make_store(self, directory, capacity_bytes, quotas):
        options = MooncakeOptions(
            capacity_bytes=capacity_bytes, buffer_bytes=16 * MIB, prefix=next(prefixes)
        )
        return MooncakeStore(options, quotas, link=self.link)

    # Pins are of a copy and bind nobody's room: see test_an_open_blob_is_a_copy_... below.
    test_an_open_blob_is_not_evicted = None
    test_a_blob_opened_twice_is_pinned_until_both_are_closed = None
    test_a_hidden_blob_takes_room_until_its_last_reader_is_gone = None
    test_what_is_being_read_or_written_leaves_no_room = None

    def test_an_open_blob_is_a_copy_that_outlives_its_eviction(self):
        async def scenario(store: MooncakeStore) -> None:
            await put(store, blob_name(0), payload_of(0))
            handle = await store.open(blob_name(0))
            for number in range(1, 5):
                await put(store, blob_name(number), payload_of(number))
            assert await held(store, 0, 3, 4) == [3, 4]
            assert content(handle) == payload_of(0)
            handle.close()

        self.run(scenario, blobs=2)


# ---- two processes


def test_what_one_process_puts_another_gets_and_what_is_killed_with_it_is_missing(master):
    options = options_of(master)

    async def scenario(store: MooncakeStore) -> None:
        with MooncakePeer(options) as peer:
            assert peer.ask("put", 1)
            assert peer.ask("put", 2)
            await put(store, blob_name(3), payload_of(3, MIB))
            assert await held(store, 1, 2, 3, 4) == [1, 2, 3]
            assert await get(store, blob_name(1)) == payload_of(1, MIB)
            assert peer.ask("get", 3) == "right"
            assert peer.ask("get", 4) == "missing"
            peer.signal(signal.SIGKILL)
            for number in (1, 2):
                with within(TIMEOUT_S + 0.5):
                    assert await get(store, blob_name(number)) is None
            with within(1):
                assert await get(store, blob_name(3)) == payload_of(3, MIB)
                await put(store, blob_name(4), payload_of(4, MIB))
                assert await get(store, blob_name(4)) == payload_of(4, MIB)
            await until(CLIENT_TTL_S + 8, lambda: gone(store, 1, 2))
        assert await held(store, 1, 2, 3, 4) == [3, 4]

    play(options, scenario)


def test_what_a_killed_process_held_costs_its_readers_next_to_nothing_and_is_stored_anew(master):
    options = options_of(master)

    async def scenario(store: MooncakeStore) -> None:
        with MooncakePeer(options) as peer:
            for number in range(10):
                assert peer.ask("put", number)
            await put(store, blob_name(20), payload_of(20, MIB))
            peer.signal(signal.SIGKILL)
            assert len(await held(store, *range(10))) == 10, "nobody knows yet"
            with within(0.5):
                for number in range(10):
                    assert await get(store, blob_name(number)) is None
                assert await held(store, *range(10), 20) == [20]
            await put(store, blob_name(3), payload_of("anew"))
            assert await get(store, blob_name(3)) == payload_of("anew")
            assert await held(store, *range(10), 20) == [3, 20]
        with MooncakePeer(options) as peer:
            assert peer.ask("put", 4)
            assert await get(store, blob_name(4)) == payload_of(4, MIB), "it is back elsewhere"

    play(options, scenario)


def test_a_segment_that_could_not_be_read_is_asked_again_after_a_while(master, monkeypatch):
    options = options_of(master)

    async def scenario(store: MooncakeStore) -> None:
        with MooncakePeer(options) as peer:
            for number in (1, 2):
                assert peer.ask("put", number)
            await store._silent.note(store._key(blob_name(1)))
            assert await held(store, 1, 2) == [1, 2], "its process is there"
            monkeypatch.setattr(mooncake_segments, "SILENT_S", 0.5)
            monkeypatch.setattr(mooncake_segments, "listens", nobody)
            await store._silent.note(store._key(blob_name(1)))
            assert await held(store, 1, 2) == []
            assert await store.open(blob_name(2)) is None
            await until(2, lambda: held(store, 1, 2))
            assert await get(store, blob_name(2)) == payload_of(2, MIB)

    play(options, scenario)


async def nobody(address: str) -> bool:
    return False


def test_asking_for_nothing_is_no_question(master):
    async def scenario(store: MooncakeStore) -> None:
        assert await store.exists([]) == []

    play(options_of(master), scenario)


async def gone(store: MooncakeStore, *numbers: int) -> bool:
    return not await held(store, *numbers)


def test_puts_that_went_to_a_killed_process_work_again_after_a_bounded_time(master):
    options = options_of(master, capacity_bytes=256 * MIB)

    async def scenario(store: MooncakeStore) -> None:
        with MooncakePeer(options_of(master, options.prefix, segment_bytes=64 * MIB)) as peer:
            # Its own segment is full: the next ones go to the peer's.
            for number in range(24):
                await put(store, blob_name(number), payload_of(number, MIB))
            assert peer.ask("get", 23) == "right"
            peer.signal(signal.SIGKILL)
            began = time.monotonic()
            for number in range(100, 110):
                await until(CLIENT_TTL_S + 8, lambda number=number: puts(store, number))
                assert await get(store, blob_name(number)) == payload_of(number, MIB)
            print(f"10 puts of 1 MiB after the kill: {time.monotonic() - began:.1f} s")
            for number in range(24):
                assert await get(store, blob_name(number)) in (None, payload_of(number, MIB))

    play(options, scenario)


def test_with_two_replicas_a_blob_outlives_either_process():
    # Beside segments that others have left behind it may have only one that lives.
    with MooncakeMaster() as alone:
        outlives_either_process(options_of(alone, replicas=2))


def outlives_either_process(options: MooncakeOptions) -> None:
    async def scenario(store: MooncakeStore) -> None:
        with MooncakePeer(options) as peer:
            await put(store, blob_name(1), payload_of(1, MIB))
            peer.signal(signal.SIGKILL)

            async def served() -> bool:
                return await get(store, blob_name(1)) == payload_of(1, MIB)

            await until(CLIENT_TTL_S + 8, served)

    play(options, scenario)


def test_a_process_that_hangs_costs_one_timeout_and_the_others_nothing(master):
    options = options_of(master)

    async def scenario(store: MooncakeStore) -> None:
        with MooncakePeer(options) as peer:
            assert peer.ask("put", 1)
            await put(store, blob_name(2), payload_of(2))
            peer.signal(signal.SIGSTOP)
            with within(TIMEOUT_S + 0.5):
                assert await store.open(blob_name(1)) is None
            await until(2, lambda: puts(store, 3))
            assert await get(store, blob_name(2)) == payload_of(2)

    play(options, scenario)


def test_the_http_metadata_server_of_the_master_does_as_well():
    with MooncakeMaster("--enable_http_metadata_server=true") as master:
        options = options_of(master, metadata=master.metadata)

        async def scenario(store: MooncakeStore) -> None:
            with MooncakePeer(options) as peer:
                assert peer.ask("put", 1)
                assert await get(store, blob_name(1)) == payload_of(1, MIB)

        play(options, scenario)


# ---- the master


def test_a_master_that_is_not_there_is_named_at_the_start():
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    options = MooncakeOptions(address, local_hostname="127.0.0.1", segment_bytes=SEGMENT)
    store = MooncakeStore(options)

    async def run() -> None:
        with within(3), pytest.raises(TierUnavailableError, match=address):
            await store.start()
        await store.close()

    asyncio.run(run())


def test_a_metadata_server_that_is_not_there_is_named_at_the_start(master):
    metadata = f"http://127.0.0.1:{free_ports(1)[0]}/metadata"

    async def run() -> None:
        store = MooncakeStore(options_of(master, metadata=metadata))
        with pytest.raises(TierUnavailableError, match=f"--mooncake-metadata {metadata}"):
            await store.start()
        await store.close()

    asyncio.run(run())


def test_whoever_else_listens_there_is_no_master():
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            address = f"127.0.0.1:{port}"
            options = MooncakeOptions(address, segment_bytes=SEGMENT, timeout_s=0.5)
            store = MooncakeStore(options)
            with within(15):
                with pytest.raises(TierUnavailableError, match=address):
                    await store.start()
                await store.close()

    asyncio.run(run())


def test_a_master_that_dies_means_misses_at_once_and_it_comes_back():
    with MooncakeMaster() as master:

        async def scenario(store: MooncakeStore) -> None:
            await put(store, blob_name(1), payload_of(1))
            master.signal(signal.SIGKILL)
            with within(TIMEOUT_S + 0.5):
                assert await store.open(blob_name(1)) is None
            with within(0.1):
                assert await held(store, 1) == []
                assert await store.open(blob_name(1)) is None
                with pytest.raises(TierUnavailableError, match=master.address):
                    await reserve(store, blob_name(2), payload_of(2))
            master.start()
            took = await until(15, lambda: puts(store, 2))
            print(f"puts work {took:.1f} s after the master is back")
            assert await get(store, blob_name(2)) == payload_of(2, MIB)
            # A new master knows no blobs.
            assert await held(store, 1, 2) == [2]

        play(options_of(master), scenario)


def test_a_master_that_hangs_means_misses_and_it_comes_back():
    with MooncakeMaster() as master:

        async def scenario(store: MooncakeStore) -> None:
            for number in (1, 4):
                await put(store, blob_name(number), payload_of(number))
            draft = await reserve(store, blob_name(2), payload_of(2))
            with master.stopped():
                with within(TIMEOUT_S + 0.5), pytest.raises(TierUnavailableError):
                    await store.commit(draft)
                with within(0.1):
                    assert await store.open(blob_name(1)) is None
                    with pytest.raises(TierUnavailableError, match=master.address):
                        await store.quarantine(blob_name(4))
            took = await until(15, lambda: puts(store, 3))
            print(f"puts work {took:.1f} s after the master goes on")
            assert await get(store, blob_name(1)) == payload_of(1)
            # The master still has what it could not be told to forget.
            assert await held(store, 4) == []
            assert await store.open(blob_name(4)) is None
            await put(store, blob_name(4), payload_of("new"))
            assert await get(store, blob_name(4)) == payload_of("new")

        play(options_of(master), scenario)


def test_closing_without_a_master_takes_a_bounded_time():
    async def run() -> None:
        with MooncakeMaster() as master:
            store = MooncakeStore(options_of(master))
            await store.start()
            master.stop()
            with within(20):
                await store.close()

    asyncio.run(run())


# ---- room


def test_the_master_evicts_when_everything_is_full_and_lookups_notice(master):
    async def scenario(store: MooncakeStore) -> None:
        for number in range(40):
            await until(5, lambda number=number: puts(store, number))
            assert await get(store, blob_name(number)) in (None, payload_of(number, MIB))
        there = await held(store, *range(40))
        assert 0 < len(there) < 20
        assert store.stats().blobs == len(there)

    with MooncakeMaster("--default_kv_lease_ttl=100") as alone:
        play(options_of(alone, capacity_bytes=256 * MIB), scenario)


def test_what_is_larger_than_the_staging_memory_is_refused(master):
    async def scenario(store: MooncakeStore) -> None:
        with pytest.raises(TierExhaustedError, match="--mooncake-buffer"):
            await reserve(store, blob_name(1), payload_of(1, 2 * MIB))
        await put(store, blob_name(1), payload_of(1))

    play(options_of(master, buffer_bytes=MIB), scenario)


def test_a_blob_that_no_segment_holds_is_no_room_and_gives_its_room_back(master):
    async def scenario(store: MooncakeStore) -> None:
        with pytest.raises(TierExhaustedError, match="no room"):
            await put(store, blob_name(1), payload_of(1, 20 * MIB))
        assert store.stats().used_bytes == 0
        await put(store, blob_name(2), payload_of(2))

    with MooncakeMaster() as alone:
        play(options_of(alone, capacity_bytes=64 * MIB), scenario)


def test_a_segment_larger_than_the_memory_is_no_room(master):
    async def run() -> None:
        store = MooncakeStore(options_of(master, segment_bytes=1 << 50))
        with pytest.raises(TierExhaustedError, match="--mooncake-segment"):
            await store.start()
        await store.close()

    asyncio.run(run())


# ---- what else may be


def test_an_object_that_is_no_blob_is_a_miss(master):
    async def scenario(store: MooncakeStore) -> None:
        for number, junk in enumerate((b"x", b"x" * 100, trailer(info_of(b"12")))):
            store.arena.memory[: len(junk)] = junk
            key = store._key(blob_name(number))
            assert await store._link.call("upsert_from", key, store._base, len(junk)) == 0
            assert await store.open(blob_name(number)) is None

    play(options_of(master), scenario)


def test_two_services_that_put_the_same_blob_at_a_time_both_succeed(master):
    options = options_of(master, segment_bytes=128 * MIB)

    async def scenario(store: MooncakeStore) -> None:
        with MooncakePeer(options) as peer:
            for number in range(12):
                payload = payload_of(number, 4 * MIB)
                draft = await reserve(store, blob_name(number), payload)
                asked = asyncio.create_task(
                    asyncio.to_thread(peer.ask, "put", number, num_bytes=4 * MIB)
                )
                # Until the peer has made its payload, so that the two meet.
                await asyncio.sleep(0.002 * number)
                await store.commit(draft)
                assert await asked is True
                assert await get(store, blob_name(number)) == payload

    play(options, scenario)


def test_memory_under_a_call_that_was_given_up_is_not_used_again_before_it_ends(link):
    async def run() -> None:
        options = MooncakeOptions(buffer_bytes=4 * MIB, prefix=next(prefixes))
        store = MooncakeStore(options, link=link)
        await store.start()
        await put(store, blob_name(1), payload_of(1))
        go, client = threading.Event(), link._client
        link._client = Slow(client, go)
        reading = asyncio.create_task(store.open(blob_name(1)))
        while "get_into" not in link._client.called:
            await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert len(store.arena._held) == 1
        go.set()
        link._client = client
        assert await until(5, lambda: all_free(store)) < 5
        assert await get(store, blob_name(1)) == payload_of(1)
        await store.close()

    asyncio.run(run())


class Slow:
    """A client whose get_into waits for `go`."""

    def __init__(self, client: Any, go: threading.Event) -> None:
        self.client, self.go = client, go
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def get_into(self, *arguments: Any) -> Any:
        self.called.append("get_into")
        self.go.wait()
        return self.client.get_into(*arguments)


async def all_free(store: MooncakeStore) -> bool:
    return not store.arena._held


def test_the_service_still_gets_its_signals(master):
    async def scenario(store: MooncakeStore) -> None:
        asked = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(asked.wait(), 5)

    play(options_of(master), scenario)


def test_staging_memory_can_be_a_file_that_clients_map(link, tmp_path: Path):
    async def run() -> None:
        options = MooncakeOptions(buffer_bytes=4 * MIB, prefix=next(prefixes))
        store = MooncakeStore(options, directory=tmp_path, link=link)
        await store.start()
        await put(store, blob_name(1), payload_of(1))
        handle = await store.open(blob_name(1))
        begin = handle.offset
        assert store.arena.path.read_bytes()[begin : begin + SIZE] == payload_of(1)
        handle.close()
        await store.close()

    asyncio.run(run())

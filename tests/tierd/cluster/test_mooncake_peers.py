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
import signal
import socket
import time
from dataclasses import replace

import pytest
from mooncake_master import CLIENT_TTL_S, MIB, MooncakeMaster, free_ports
from mooncake_peer import MooncakePeer
from mooncake_play import (
    SEGMENT,
    TIMEOUT_S,
    options_of,
    play,
    puts,
    until,
    within,
)
from pausing import pause
from store_blobs import blob_name, get, held, payload_of, put, reserve

from kvtier.errors import TierUnavailableError
from kvtier_tierd.stores.mooncake import segments as mooncake_segments
from kvtier_tierd.stores.mooncake.options import MooncakeOptions
from kvtier_tierd.stores.mooncake.store import MooncakeStore

pytestmark = pytest.mark.usefixtures("mooncake")

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
            assert len(await held(store, *range(10))) == 10, "no service knows yet"
            with within(TIMEOUT_S / 2):
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
            monkeypatch.setattr(mooncake_segments, "listens", never)
            await store._silent.note(store._key(blob_name(1)))
            assert await held(store, 1, 2) == []
            assert await store.open(blob_name(2)) is None
            await until(2, lambda: held(store, 1, 2))
            assert await get(store, blob_name(2)) == payload_of(2, MIB)

    play(options, scenario)


async def never(address: str) -> bool:
    return False


async def gone(store: MooncakeStore, *numbers: int) -> bool:
    return not await held(store, *numbers)


def test_puts_that_went_to_a_killed_process_work_again_after_a_bounded_time():
    # Beside segments that others have left behind, the puts before the kill could go to those.
    with MooncakeMaster() as alone:
        put_again_after_a_kill(options_of(alone, capacity_bytes=256 * MIB))


def put_again_after_a_kill(options: MooncakeOptions) -> None:
    async def scenario(store: MooncakeStore) -> None:
        with MooncakePeer(replace(options, segment_bytes=64 * MIB)) as peer:
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
            pause(peer.process.pid)
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


def test_another_process_that_listens_there_is_no_master():
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
            with within(TIMEOUT_S / 2):
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
                with within(TIMEOUT_S / 2):
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

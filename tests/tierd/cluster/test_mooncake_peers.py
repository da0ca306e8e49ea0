"""The distributed store, on a real mooncake_master: what all services see, and what dies with one.

a peer is killed      its blobs are misses; puts that go to it work again
a peer hangs          what it has is a miss; the others go on
the master is gone    misses, and puts fail naming it; all is well when it is back
"""

from __future__ import annotations

import signal
import socket
from dataclasses import replace

import pytest
from mooncake_master import MIB, SEGMENT, MooncakeMaster, free_ports, opened, options_of, puts
from mooncake_peer import MooncakePeer
from pausing import pause
from store_blobs import blob_name, get, held, payload_of, put, reserve
from waiting import FakeClock, wait_for_async

from kvtier.errors import TierUnavailableError
from kvtier_tierd.stores.mooncake import segments as mooncake_segments
from kvtier_tierd.stores.mooncake.options import MooncakeOptions
from kvtier_tierd.stores.mooncake.store import MooncakeStore

pytestmark = pytest.mark.usefixtures("mooncake")

# ---- two processes


async def test_a_segment_that_could_not_be_read_is_asked_again_after_a_while(master, monkeypatch):
    options = options_of(master)
    async with opened(options) as store:
        with MooncakePeer(options) as peer:
            for number in (1, 2):
                assert peer.ask("put", number)
            await store._silent.note(store._key(blob_name(1)))
            assert await held(store, 1, 2) == [1, 2], "its process is there"
            clock = FakeClock()
            monkeypatch.setattr(mooncake_segments, "time", clock)
            monkeypatch.setattr(mooncake_segments, "listens", never)
            await store._silent.note(store._key(blob_name(1)))
            assert await held(store, 1, 2) == []
            assert await store.open(blob_name(2)) is None
            clock.now += mooncake_segments.SILENT_S
            assert await held(store, 1, 2) == [1, 2]
            assert await get(store, blob_name(2)) == payload_of(2, MIB)


async def never(address: str) -> bool:
    return False


async def test_puts_that_went_to_a_killed_process_work_again():
    # The puts before the kill could go to segments that others have left behind, so there are none.
    with MooncakeMaster() as alone:
        options = options_of(alone, capacity_bytes=256 * MIB)
        async with opened(options) as store:
            with MooncakePeer(replace(options, segment_bytes=64 * MIB)) as peer:
                # Its own segment is full: the next ones go to the peer's.
                for number in range(24):
                    await put(store, blob_name(number), payload_of(number, MIB))
                assert peer.ask("get", 23) == "right"
                peer.signal(signal.SIGKILL)
                for number in range(100, 110):
                    await wait_for_async(lambda number=number: puts(store, number))
                    assert await get(store, blob_name(number)) == payload_of(number, MIB)
                for number in range(24):
                    assert await get(store, blob_name(number)) in (None, payload_of(number, MIB))


async def test_with_two_replicas_a_blob_outlives_either_process():
    # Only one of its segments may live beside those that others have left behind, so there are
    # none.
    with MooncakeMaster() as alone:
        options = options_of(alone, replicas=2)
        async with opened(options) as store:
            with MooncakePeer(options) as peer:
                await put(store, blob_name(1), payload_of(1, MIB))
                peer.signal(signal.SIGKILL)

                async def served() -> bool:
                    return await get(store, blob_name(1)) == payload_of(1, MIB)

                await wait_for_async(served)


async def test_a_process_that_hangs_costs_one_timeout_and_the_others_nothing(master):
    options = options_of(master)
    async with opened(options) as store:
        with MooncakePeer(options) as peer:
            assert peer.ask("put", 1)
            await put(store, blob_name(2), payload_of(2))
            pause(peer.process.pid)
            assert await store.open(blob_name(1)) is None
            await wait_for_async(lambda: puts(store, 3))
            assert await get(store, blob_name(2)) == payload_of(2)


async def test_the_http_metadata_server_of_the_master_does_as_well():
    with MooncakeMaster("--enable_http_metadata_server=true") as master:
        options = options_of(master, metadata=master.metadata)
        async with opened(options) as store:
            with MooncakePeer(options) as peer:
                assert peer.ask("put", 1)
                assert await get(store, blob_name(1)) == payload_of(1, MIB)


# ---- the master


async def test_a_master_that_is_not_there_is_named_at_the_start():
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    options = MooncakeOptions(address, local_hostname="127.0.0.1", segment_bytes=SEGMENT)
    store = MooncakeStore(options)
    with pytest.raises(TierUnavailableError, match=address):
        await store.start()
    await store.close()


async def test_a_metadata_server_that_is_not_there_is_named_at_the_start(master):
    metadata = f"http://127.0.0.1:{free_ports(1)[0]}/metadata"
    store = MooncakeStore(options_of(master, metadata=metadata))
    with pytest.raises(TierUnavailableError, match=f"--mooncake-metadata {metadata}"):
        await store.start()
    await store.close()


async def test_another_process_that_listens_there_is_no_master():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        address = f"127.0.0.1:{port}"
        options = MooncakeOptions(address, segment_bytes=SEGMENT, timeout_s=0.5)
        store = MooncakeStore(options)
        with pytest.raises(TierUnavailableError, match=address):
            await store.start()
        await store.close()


async def test_a_master_that_hangs_means_misses_and_it_comes_back():
    with MooncakeMaster() as master:
        async with opened(options_of(master)) as store:
            for number in (1, 4):
                await put(store, blob_name(number), payload_of(number))
            draft = await reserve(store, blob_name(2), payload_of(2))
            with master.stopped():
                with pytest.raises(TierUnavailableError):
                    await store.commit(draft)
                assert await store.open(blob_name(1)) is None
                with pytest.raises(TierUnavailableError, match=master.address):
                    await store.quarantine(blob_name(4))
            await wait_for_async(lambda: puts(store, 3))
            assert await get(store, blob_name(1)) == payload_of(1)
            # The master still has what it could not be told to forget.
            assert await held(store, 4) == []
            assert await store.open(blob_name(4)) is None
            await put(store, blob_name(4), payload_of("new"))
            assert await get(store, blob_name(4)) == payload_of("new")


async def test_closing_without_a_master_ends():
    with MooncakeMaster() as master:
        store = MooncakeStore(options_of(master))
        await store.start()
        master.stop()
        await store.close()

"""The same host: one file that service and clients map, and a stream for what is not in it. Calls
that are interrupted leave nothing held."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading

import pytest
from live_tier import (
    LAYOUT,
    blob_of,
    connected,
    fetch,
    header_of,
    in_process,
    key_of,
    payload_of,
    stalled_put,
)
from waiting import SAFETY_S, wait_for

from kvtier.errors import TierUnavailableError, UsageError
from kvtier.tier.client import Blob, Landing
from kvtier.tier.transport.shared_memory import SharedMemory
from kvtier.tier.wire import shared_digest
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.stores.layered import LayeredOptions

MIB = 1 << 20


@pytest.mark.parametrize("shared", [True, False])
def test_a_flipped_bit_in_the_memory_is_corrupt_then_quarantined_then_missing(tier, shared):
    with connected(tier, shared=shared) as client:
        for number in range(4):
            client.put(blob_of(number))
        before = client.stats().used_bytes
        with open(tier.store.shared.path, "r+b") as file:
            file.seek(file.read().index(payload_of(2)) + 5000)
            file.write(bytes([payload_of(2)[5000] ^ 1]))
        keys = [key_of(number) for number in range(4)]
        outcome, landed = fetch(client, keys)
        assert [one.name for one in outcome] == ["LANDED", "LANDED", "CORRUPT", "LANDED"]
        assert landed == {number: payload_of(number) for number in (0, 1, 3)}
        assert client.stats().quarantined == 1
        assert client.exists(keys).present == [True, True, False, True]
        assert fetch(client, [key_of(2)])[0] == [Landing.MISSING]
        assert client.stats().used_bytes == before * 3 // 4
        assert client.put(blob_of(2))
        assert fetch(client, [key_of(2)])[1] == {0: payload_of(2)}


def test_a_file_that_is_not_the_services_memory_is_not_mapped(memory_directory, tmp_path):
    token = bytes(range(16))

    right = shared_digest(token)

    def opened(path, num_bytes=4096, digest=right):
        return SharedMemory.open(str(path), num_bytes, digest)

    real, private = memory_directory / "kvtier-tier-1", tmp_path / "private"
    for path in (real, private):
        path.write_bytes(token + bytes(4080))
    link, pipe = memory_directory / "kvtier-tier-link", memory_directory / "kvtier-tier-pipe"
    link.symlink_to(private)
    short = memory_directory / "kvtier-tier-short"
    short.write_bytes(token[:5])
    os.mkfifo(pipe)
    assert opened(real) is not None
    for other in (
        opened(real, digest=shared_digest(bytes(16))),
        opened(real, digest=token),
        opened(real, digest=b""),
        opened(short, num_bytes=5, digest=shared_digest(token[:5])),
        opened(real, num_bytes=8192),
        opened(real, num_bytes=1 << 63),
        opened(f"{real}\0"),
        opened(memory_directory / "kvtier-tier-2"),
        # A service may name any path.
        opened(private),
        opened(link),
        opened(pipe, num_bytes=0),
    ):
        assert other is None


def test_a_client_elsewhere_streams(tier, memory_directory):
    os.rename(tier.store.shared.path, memory_directory / "elsewhere")
    with connected(tier) as client:
        assert not client.shares_memory
        assert client.put(blob_of(1))
        assert fetch(client, [key_of(1)])[1] == {0: payload_of(1)}


def test_what_memory_has_no_room_for_comes_by_the_stream(directory, memory_directory):
    """The blobs are on the disk behind a memory that is full of what is being read."""
    store = LayeredOptions(disk_path=directory, memory_bytes=64 << 10)
    with (
        in_process(store=store, shared_directory=memory_directory) as tier,
        connected(tier) as client,
    ):
        for number in range(12):
            client.put(blob_of(number))
            tier.run(tier.store.settle())
        assert fetch(client, [key_of(number) for number in range(13)])[1] == {
            number: payload_of(number) for number in range(12)
        }
        streamed, shared = (
            tier.server.metrics.registry.get_sample_value(
                "kvtier_tier_blobs_moved_total",
                {"direction": "get", "namespace": "default", "path": path},
            )
            for path in ("stream", "shared")
        )
        assert streamed >= 6
        assert streamed + shared == 12
        assert tier.call(tier.store.check_integrity) == []


def test_reconnecting_while_others_copy_disturbs_none_of_them(tier):
    """The mapping is replaced under the hands of threads that use it."""
    with connected(tier) as client:
        blobs = [blob_of(number, 300_000) for number in range(4)]
        ended, failures = threading.Event(), []

        def use():
            while not ended.is_set():
                try:
                    for blob in blobs:
                        client.put(blob)
                    _, landed = fetch(client, [blob.key for blob in blobs])
                    for position, payload in landed.items():
                        assert payload == blobs[position].payload[0]
                except Exception as error:
                    failures.append(error)

        threads = [threading.Thread(target=use) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(60):
            client._shared = None
            client.connect()
        ended.set()
        for thread in threads:
            thread.join()
        assert failures == []


def test_nothing_that_is_open_is_handed_down_to_other_programs(memory_directory):
    """Neither sockets nor the memory: a program started later would keep them."""
    before = inheritable()
    with in_process(shared_directory=memory_directory) as tier, connected(tier) as client:
        assert client.shares_memory
        client.put(Blob(key_of(1), LAYOUT, [bytes(10)]))
        assert inheritable() <= before


def inheritable() -> set[str]:
    """Return what a program that is started now would have open."""
    names = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.get_inheritable(int(fd)):
                names.add(os.readlink(f"/proc/self/fd/{fd}"))
    return names


# ---- calls that are cancelled, fail or are cut off in the middle: nothing stays held


def test_a_put_that_is_cancelled_anywhere_leaves_nothing_held(tier, stub):
    for chunks in range(4):
        with stalled_put(stub, 1, 4 * MIB, chunks * MIB) as (call, _):
            wait_for(lambda: tier.transfers() == 1)
            wait_for(lambda sent=chunks * MIB: tier.server.budget.used_bytes == sent)
            call.cancel()
            wait_for(lambda: tier.problems() == [])
    assert stub.Exists(pb.ExistsRequest(keys=[key_of(1)])).leading_run == 0


def test_a_get_that_is_cancelled_anywhere_leaves_nothing_held(tier, client, stub):
    client.put(blob_of(1, 4 * MIB))
    for responses in range(6):
        call = stub.Get(pb.GetRequest(keys=[key_of(1)] * 20))
        for _ in range(responses):
            next(call)
        wait_for(lambda: any(e.pins for e in tier.store.account.entries.values()))
        call.cancel()
        wait_for(lambda: tier.problems() == [])


def test_an_acquire_that_is_cancelled_leaves_nothing_leased(tier, client, stub, token, monkeypatch):
    keys = [key_of(number) for number in range(4)]
    for number in range(4):
        client.put(blob_of(number))
    real, reached = tier.store.open, threading.Event()

    async def slow(name):
        if name.key == keys[3]:
            reached.set()
            await asyncio.Event().wait()
        return await real(name)

    monkeypatch.setattr(tier.store, "open", slow)
    call = stub.Acquire.future(pb.AcquireRequest(keys=keys, shared_token=token))
    assert reached.wait(SAFETY_S)
    call.cancel()
    wait_for(lambda: tier.problems() == [])


@pytest.mark.parametrize("shared", [True, False])
def test_a_get_whose_caller_fails_leaves_nothing_held(tier, shared):
    """The same goes for a buffer of another size, which is refused by name."""

    def fail(offer):
        if offer.position == 1:
            raise ZeroDivisionError("a bug")
        return memoryview(bytearray(offer.num_bytes))

    with connected(tier, shared=shared) as client:
        for number in range(3):
            client.put(blob_of(number))
        with pytest.raises(ZeroDivisionError):
            client.get([key_of(number) for number in range(3)], fail, MIB)
        for size in (9_999, 10_001):
            with pytest.raises(UsageError, match="land: expected a buffer of 10000 bytes"):
                client.get([key_of(1)], lambda _, size=size: memoryview(bytearray(size)), MIB)
    wait_for(lambda: tier.problems() == [])


def test_calls_cut_off_by_closing_the_client_end_at_once(tier):
    go_on, errors = threading.Event(), []

    def stuck():
        yield pb.PutRequest(header=header_of(blob_of(1)))
        go_on.wait(SAFETY_S)

    with connected(tier, shared=False) as client:

        def put():
            try:
                client._connection.call(client._stub.Put, stuck(), client.deadline(10_000))
            except TierUnavailableError as error:
                errors.append(error)

        thread = threading.Thread(target=put)
        thread.start()
        wait_for(lambda: tier.transfers() == 1)
        client.close()
        thread.join(SAFETY_S)
        assert not thread.is_alive()
        go_on.set()
        assert len(errors) == 1
        for call in (client.connect, client.stats, lambda: fetch(client, [key_of(1)])):
            with pytest.raises(TierUnavailableError):
                call()
        client.close()
    wait_for(lambda: tier.problems() == [])

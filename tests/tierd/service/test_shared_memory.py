"""The same host: leases, mapped memory, and clients that go away in the middle of something."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time

import grpc
import pytest
from live_tier import (
    LAYOUT,
    blob_of,
    eventually,
    failing,
    fetch,
    header_of,
    in_process,
    key_of,
    live_tier,
    payload_of,
    raw_stub,
)

from kvtier.errors import TierProtocolError, TierUnavailableError, UsageError
from kvtier.tier.client import Blob, Landing, TierClient
from kvtier.tier.transport import shared_memory as shared_module
from kvtier.tier.transport import shared_puts
from kvtier.tier.transport.shared_memory import SharedMemory, copy
from kvtier.v1 import tier_pb2 as pb

MIB = 1 << 20


@pytest.fixture
def client(tier):
    with TierClient(tier.address, timeout_s=10.0) as client:
        client.connect()
        assert client.shares_memory
        yield client


def reserve(tier, stub, *numbers, lease_ms=0):
    headers = [header_of(blob_of(number)) for number in numbers]
    token = tier.server.service.shared.token
    request = pb.ReserveRequest(headers=headers, lease_ms=lease_ms, shared_token=token)
    return stub.Reserve(request)


def fill(tier, extent, number):
    payload = payload_of(number)
    with open(tier.server.service.shared.path, "r+b") as file:
        file.seek(extent.offset)
        file.write(payload)


# ---- leases


def test_a_lease_that_is_over_gives_its_room_back_and_its_commit_is_refused(tier, client):
    client.put(blob_of(1))
    with raw_stub(tier.address) as stub:
        extents = reserve(tier, stub, 1, 2, 3, lease_ms=1).extents
        assert [extent.key for extent in extents] == [key_of(2), key_of(3)], "1 is held"
        for extent in extents:
            fill(tier, extent, int.from_bytes(extent.key, "big"))
        eventually(lambda: tier.server.service.leases.expired == 2)
        with failing(grpc.StatusCode.FAILED_PRECONDITION):
            stub.Commit(pb.CommitRequest(leases=[extents[0].lease]))
    assert tier.problems() == []
    assert client.exists([key_of(1), key_of(2)]).present == [True, False]
    assert fetch(client, [key_of(1)])[1] == {0: payload_of(1)}, "nothing else is lost"


def test_a_commit_is_of_all_its_leases_or_of_none(tier, client):
    with raw_stub(tier.address) as stub:
        first, second = reserve(tier, stub, 1, 2, lease_ms=60_000).extents
        for extent, number in ((first, 1), (second, 2)):
            fill(tier, extent, number)
        for numbers in ([first.lease, 7], [first.lease, first.lease]):
            with failing(grpc.StatusCode.FAILED_PRECONDITION):
                stub.Commit(pb.CommitRequest(leases=numbers))
        assert client.exists([key_of(1)]).leading_run == 0
        answer = stub.Commit(pb.CommitRequest(leases=[first.lease, second.lease]))
        assert answer.stored == 2
    assert fetch(client, [key_of(1), key_of(2)])[1] == {0: payload_of(1), 1: payload_of(2)}


def test_a_lease_for_reading_cannot_be_committed_and_ends_when_given_back(tier, client):
    client.put(blob_of(1))
    token = tier.server.service.shared.token
    with raw_stub(tier.address) as stub:
        request = pb.AcquireRequest(keys=[key_of(1)], lease_ms=60_000, shared_token=token)
        (extent,) = stub.Acquire(request).extents
        with failing(grpc.StatusCode.FAILED_PRECONDITION):
            stub.Commit(pb.CommitRequest(leases=[extent.lease]))
        assert tier.problems() != []
        stub.Release(pb.ReleaseRequest(leases=[extent.lease]))
    assert tier.problems() == []


def test_a_client_that_is_killed_pins_no_memory(tier):
    script = f"""
import os, signal, sys
sys.path[:0] = {sys.path!r}
from live_tier import *
from test_shared_memory import *
client = TierClient({tier.address!r})
info = client.connect()
client.put(blob_of(1))
stub = client._stub
header = header_of(blob_of(2))
stub.Reserve(pb.ReserveRequest(headers=[header], lease_ms=300, shared_token=info.shared_token))
stub.Acquire(pb.AcquireRequest(keys=[key_of(1)], lease_ms=300, shared_token=info.shared_token))
def half():
    yield pb.PutRequest(header=header_of(blob_of(3)))
    os.kill(os.getpid(), signal.SIGKILL)
stub.Put(half())
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert done.returncode == -9
    eventually(lambda: tier.problems() == [])
    assert tier.server.service.leases.expired == 2


def test_a_lease_lasts_as_long_as_asked_for_and_never_longer_than_a_minute(tier):
    with raw_stub(tier.address) as stub:
        for asked, got in ((0, 10_000), (1234, 1234), (1 << 31, 60_000)):
            answer = reserve(tier, stub, 1, lease_ms=asked)
            assert answer.expires_ms == got
            stub.Release(pb.ReleaseRequest(leases=[extent.lease for extent in answer.extents]))


def test_a_writer_that_was_asleep_until_its_lease_was_over_writes_nothing(tier, monkeypatch):
    """Its room may be another blob's by then."""
    client = TierClient(tier.address, timeout_s=0.2)
    real_copy, late = shared_puts.copy, []

    def copy_late(pieces, into, **options):
        eventually(lambda: tier.server.service.leases.expired == 1)
        late.append(bytes(into))
        try:
            real_copy(pieces, into, **options)
        finally:
            assert bytes(into) == late[0]

    with client:
        client.connect()
        monkeypatch.setattr(shared_puts, "copy", copy_late)
        with pytest.raises(TierUnavailableError, match="lease"):
            client.put(blob_of(1))
        assert late
        monkeypatch.undo()
        client.connect()
        assert client.put(blob_of(1))


def test_room_that_could_not_be_filled_is_given_back_at_once(tier, client, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(shared_puts, "copy", fail)
    with pytest.raises(ZeroDivisionError):
        client.put(blob_of(1))
    assert tier.problems() == []
    assert tier.server.service.leases.expired == 0


def test_a_commit_that_fails_gives_the_room_of_the_others_back(tier, monkeypatch):
    real_commit, committed = tier.store.commit, []

    async def fail_second(draft):
        if committed:
            await tier.store.abort(draft)
            raise TierUnavailableError("the medium fails")
        committed.append(draft)
        await real_commit(draft)

    with raw_stub(tier.address) as stub:
        leases = [extent.lease for extent in reserve(tier, stub, 1, 2, 3, 4).extents]
        monkeypatch.setattr(tier.store, "commit", fail_second)
        with failing(grpc.StatusCode.UNAVAILABLE):
            stub.Commit(pb.CommitRequest(leases=leases))
    assert tier.problems() == []


# ---- the file


def test_a_flipped_byte_in_the_file_is_corrupt_then_quarantined_then_missing(tier, client):
    for number in range(4):
        client.put(blob_of(number))
    before = client.stats().used_bytes
    with open(tier.server.service.shared.path, "r+b") as file:
        damaged = file.read().index(payload_of(2)) + 5000
        file.seek(damaged)
        file.write(bytes([payload_of(2)[5000] ^ 1]))
    outcome, landed = fetch(client, [key_of(number) for number in range(4)])
    assert [one.name for one in outcome] == ["LANDED", "LANDED", "CORRUPT", "LANDED"]
    assert landed == {number: payload_of(number) for number in (0, 1, 3)}
    assert client.stats().quarantined == 1
    assert client.exists([key_of(2)]).leading_run == 0
    assert fetch(client, [key_of(2)])[0] == [Landing.MISSING]
    assert client.stats().used_bytes == before * 3 // 4
    assert client.put(blob_of(2))
    assert fetch(client, [key_of(2)])[1] == {0: payload_of(2)}


def test_a_client_that_has_mapped_the_memory_of_an_earlier_service_writes_nothing(tmp_path):
    """It finds out at its next call, connects again, and goes on."""
    directory = tmp_path / "shm"
    directory.mkdir()
    flags = ("--shared-memory", str(directory), "--memory", "1m")
    with live_tier(tmp_path, *flags) as tier, TierClient(tier.address, timeout_s=5) as client:
        client.connect()
        assert client.put(blob_of(1))
        (old,) = directory.iterdir()
        tier.kill()
        tier.start()
        (new,) = directory.iterdir()
        assert new != old, "the file of the killed one is gone"
        eventually(lambda: _answers(client))
        blank = new.read_bytes()[4096:]
        with pytest.raises(TierUnavailableError, match="connect again"):
            client.put(blob_of(2))
        with pytest.raises(TierUnavailableError, match="connect again"):
            fetch(client, [key_of(1)])
        assert new.read_bytes()[4096:] == blank
        client.connect()
        assert client.put(blob_of(2))
        assert fetch(client, [key_of(1), key_of(2)])[1] == {1: payload_of(2)}
        assert tier.terminate() == 0
        assert list(directory.iterdir()) == []


def test_a_lease_of_an_earlier_service_is_none_of_the_next(tmp_path):
    directory = tmp_path / "shm"
    directory.mkdir()
    flags = ("--shared-memory", str(directory), "--memory", "1m")

    def lease_of(stub):
        token = stub.GetServerInfo(pb.GetServerInfoRequest()).shared_token
        request = pb.ReserveRequest(headers=[header_of(blob_of(1))], shared_token=token)
        return stub.Reserve(request).extents[0].lease

    with live_tier(tmp_path, *flags) as tier:
        with raw_stub(tier.address) as stub:
            old = lease_of(stub)
        tier.kill()
        tier.start()
        with raw_stub(tier.address) as stub:
            new = lease_of(stub)
            with failing(grpc.StatusCode.FAILED_PRECONDITION):
                stub.Commit(pb.CommitRequest(leases=[old]))
            stub.Release(pb.ReleaseRequest(leases=[old]))
            assert stub.Commit(pb.CommitRequest(leases=[new])).stored == 1


def _answers(client):
    try:
        client.stats()
    except TierUnavailableError:
        return False
    return True


def test_a_file_that_is_not_the_services_memory_is_not_mapped(memory_directory, tmp_path):
    token = bytes(range(16))

    def opened(path, num_bytes=4096, token=token):
        return SharedMemory.open(str(path), num_bytes, token)

    real = memory_directory / "kvtier-tier-1"
    real.write_bytes(token + bytes(4080))
    assert opened(real) is not None
    assert opened(real, token=bytes(16)) is None
    assert opened(real, token=b"") is None
    assert opened(real, num_bytes=8192) is None
    assert opened(real, num_bytes=1 << 63) is None
    assert opened(f"{real}\0") is None
    assert opened(memory_directory / "kvtier-tier-2") is None
    private = tmp_path / "private"
    private.write_bytes(token + bytes(4080))
    assert opened(private) is None, "a service may name any path"
    link = memory_directory / "kvtier-tier-link"
    link.symlink_to(private)
    assert opened(link) is None
    pipe = memory_directory / "kvtier-tier-pipe"
    os.mkfifo(pipe)
    assert opened(pipe, num_bytes=0) is None


@pytest.mark.parametrize("extent", [(0, 10), (1 << 20, 10), (4090, 10), (16, 1 << 63)])
def test_an_extent_outside_of_the_memory_is_refused(memory_directory, extent):
    path = memory_directory / "kvtier-tier-1"
    path.write_bytes(bytes(range(16)) + bytes(4080))
    memory = SharedMemory.open(str(path), 4096, bytes(range(16)))
    with pytest.raises(TierProtocolError, match="outside"):
        memory.view(*extent)


def test_a_client_elsewhere_streams(memory_directory):
    with in_process(shared_directory=memory_directory) as tier:
        os.rename(tier.server.service.shared.path, memory_directory / "elsewhere")
        with TierClient(tier.address) as client:
            client.connect()
            assert not client.shares_memory
            assert client.put(blob_of(1))
            assert fetch(client, [key_of(1)])[1] == {0: payload_of(1)}


def test_what_is_not_in_shared_memory_comes_by_the_stream(tier, client, monkeypatch):
    """As from a disk behind a memory that has no room."""
    for number in range(4):
        client.put(blob_of(number))
    real_open = tier.store.open

    async def open_elsewhere(name):
        handle = await real_open(name)
        if handle is not None and name.key in (key_of(1), key_of(3)):
            handle.offset = None
        return handle

    monkeypatch.setattr(tier.store, "open", open_elsewhere)
    outcome, landed = fetch(client, [key_of(number) for number in range(5)])
    assert outcome == [Landing.LANDED] * 4 + [Landing.MISSING]
    assert landed == {number: payload_of(number) for number in range(4)}


# ---- going away


def test_a_put_that_is_cancelled_anywhere_leaves_nothing_held(tier):
    with raw_stub(tier.address) as stub:
        for chunks in range(4):
            sent, go_on = threading.Event(), threading.Event()

            def parts(chunks=chunks, sent=sent, go_on=go_on):
                yield pb.PutRequest(header=header_of(blob_of(1, 4 * MIB)))
                for _ in range(chunks):
                    yield pb.PutRequest(chunk=bytes(MIB))
                sent.set()
                go_on.wait(20)

            call = stub.Put.future(parts())
            assert sent.wait(20)
            eventually(lambda: tier.server.service.namespaces._in_flight["default"] == 1)
            call.cancel()
            eventually(lambda: tier.problems() == [])
            go_on.set()
        assert stub.Exists(pb.ExistsRequest(keys=[key_of(1)])).leading_run == 0


def test_a_get_that_is_cancelled_anywhere_leaves_nothing_held(tier, client):
    client.put(blob_of(1, 4 * MIB))
    with raw_stub(tier.address) as stub:
        for responses in range(6):
            call = stub.Get(pb.GetRequest(keys=[key_of(1)] * 20))
            for _ in range(responses):
                next(call)
            eventually(lambda: any(e.pins for e in tier.store.account.entries.values()))
            call.cancel()
            eventually(lambda: tier.problems() == [])


def test_a_get_whose_caller_fails_leaves_nothing_held(tier, client):
    for number in range(3):
        client.put(blob_of(number))

    def land(offer):
        if offer.position == 1:
            raise ZeroDivisionError("a bug")
        return memoryview(bytearray(offer.num_bytes))

    for one in (client, TierClient(tier.address, shared=False)):
        with one, pytest.raises(ZeroDivisionError):
            one.get([key_of(number) for number in range(3)], land, MIB)
        eventually(lambda: tier.problems() == [])


@pytest.mark.parametrize("shared", [True, False])
def test_a_buffer_of_another_size_is_refused_by_name(tier, shared):
    with TierClient(tier.address, shared=shared) as client:
        client.connect()
        client.put(blob_of(1))
        for size in (9_999, 10_001):
            with pytest.raises(UsageError, match="land: expected a buffer of 10000 bytes"):
                client.get([key_of(1)], lambda _, size=size: memoryview(bytearray(size)), MIB)
        eventually(lambda: tier.problems() == [])


def test_calls_cut_off_by_closing_the_client_end_at_once(tier):
    with TierClient(tier.address, timeout_s=20.0, shared=False) as client:
        client.connect()
        waiting, errors = threading.Event(), []

        def put():
            try:
                client._call(client._stub.Put, _stuck(waiting), client.deadline(10_000))
            except TierUnavailableError as error:
                errors.append(error)

        thread = threading.Thread(target=put)
        thread.start()
        eventually(lambda: tier.server.service.namespaces._in_flight["default"] == 1)
        began = time.monotonic()
        client.close()
        thread.join(10)
        waiting.set()
        assert time.monotonic() - began < 5
        assert len(errors) == 1
        for call in (client.connect, client.stats, lambda: fetch(client, [key_of(1)])):
            with pytest.raises(TierUnavailableError):
                call()
        client.close()
    eventually(lambda: tier.problems() == [])


def _stuck(waiting):
    yield pb.PutRequest(header=header_of(blob_of(1)))
    waiting.wait(20)


def test_reconnecting_while_others_copy_disturbs_none_of_them(tier):
    """The mapping is replaced under the hands of threads that use it."""
    with TierClient(tier.address, timeout_s=10.0) as client:
        client.connect()
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


def test_copying_stops_when_time_is_up():
    target = bytearray(3 * shared_module.BLOCK_BYTES)
    with pytest.raises(TierUnavailableError, match="lease"):
        copy([bytes(len(target))], memoryview(target), until=time.monotonic())
    copy([b"abc", b"", b"def"], memoryview(target)[:6])
    assert target[:6] == b"abcdef"


def test_nothing_that_is_open_is_handed_down_to_other_programs(memory_directory):
    """Neither sockets nor the memory: a program started later would keep them."""
    before = inheritable()
    with in_process(shared_directory=memory_directory) as tier, TierClient(tier.address) as client:
        client.connect()
        assert client.shares_memory
        client.put(Blob(key_of(1), LAYOUT, [bytes(10)]))
        assert inheritable() <= before


def inheritable() -> set[str]:
    """What a program that is started now would have open."""
    names = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.get_inheritable(int(fd)):
                names.add(os.readlink(f"/proc/self/fd/{fd}"))
    return names

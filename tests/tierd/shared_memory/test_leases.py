"""Leases on the shared memory: they end, they are of one client, and what they held comes back."""

from __future__ import annotations

import subprocess
import sys

import grpc
import pytest
from live_tier import blob_of, failing, fetch, header_of, key_of, live_tier, payload_of, raw_stub
from waiting import SAFETY_S, wait_for

from kvtier.errors import TierUnavailableError
from kvtier.tier.client import TierClient
from kvtier.tier.transport import shared
from kvtier.v1 import tier_pb2 as pb


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


def test_a_lease_that_is_over_gives_its_room_back_and_its_commit_is_refused(tier, client):
    client.put(blob_of(1))
    with raw_stub(tier.address) as stub:
        extents = reserve(tier, stub, 1, 2, 3, lease_ms=1).extents
        assert [extent.key for extent in extents] == [key_of(2), key_of(3)], "1 is held"
        for extent in extents:
            fill(tier, extent, int.from_bytes(extent.key, "big"))
        wait_for(lambda: tier.server.service.leases.expired == 2)
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
from live_tier import blob_of, header_of, key_of
from kvtier.tier.client import TierClient
from kvtier.v1 import tier_pb2 as pb
client = TierClient({tier.address!r}, timeout_s={SAFETY_S})
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
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=SAFETY_S)
    assert done.returncode == -9
    wait_for(lambda: tier.problems() == [])
    assert tier.server.service.leases.expired == 2


def test_a_lease_lasts_as_long_as_asked_for_and_never_longer_than_a_minute(tier):
    with raw_stub(tier.address) as stub:
        for asked, got in ((0, 10_000), (1234, 1234), (1 << 31, 60_000)):
            answer = reserve(tier, stub, 1, lease_ms=asked)
            assert answer.expires_ms == got
            stub.Release(pb.ReleaseRequest(leases=[extent.lease for extent in answer.extents]))


def test_a_writer_that_was_asleep_until_its_lease_was_over_writes_nothing(tier, monkeypatch):
    """The room of the lease may be another blob's by then."""
    client = TierClient(tier.address, timeout_s=0.2)
    real_copy, late = shared.copy, []

    def copy_late(pieces, into, **options):
        wait_for(lambda: tier.server.service.leases.expired == 1)
        late.append(bytes(into))
        try:
            real_copy(pieces, into, **options)
        finally:
            assert bytes(into) == late[0]

    with client:
        client.connect()
        monkeypatch.setattr(shared, "copy", copy_late)
        with pytest.raises(TierUnavailableError, match="lease"):
            client.put(blob_of(1))
        assert late
        monkeypatch.undo()
        client.connect()
        assert client.put(blob_of(1))


def test_room_that_could_not_be_filled_is_given_back_at_once(tier, client, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(shared, "copy", fail)
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

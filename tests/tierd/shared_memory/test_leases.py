"""Leases on the shared memory: they end, they are of one client, and what they held comes back."""

from __future__ import annotations

import subprocess
import sys

import grpc
import pytest
from live_tier import (
    blob_of,
    connected,
    failing,
    fetch,
    header_of,
    key_of,
    live_tier,
    payload_of,
    raw_stub,
)
from waiting import SAFETY_S, wait_for

from kvtier.errors import TierUnavailableError
from kvtier.tier.client import TierClient
from kvtier.tier.transport import shared
from kvtier.v1 import tier_pb2 as pb

OVER = grpc.StatusCode.FAILED_PRECONDITION


def reserve(stub, token, *numbers, lease_ms=0):
    headers = [header_of(blob_of(number)) for number in numbers]
    return stub.Reserve(pb.ReserveRequest(headers=headers, lease_ms=lease_ms, shared_token=token))


def commit(stub, *leases):
    return stub.Commit(pb.CommitRequest(leases=leases))


def test_a_lease_that_is_over_gives_its_room_back_and_its_commit_is_refused(
    tier, client, stub, token
):
    client.put(blob_of(1))
    extents = reserve(stub, token, 1, 2, 3, lease_ms=1).extents
    assert [extent.key for extent in extents] == [key_of(2), key_of(3)], "1 is held"
    wait_for(lambda: tier.server.service.leases.expired == 2)
    with failing(OVER):
        commit(stub, extents[0].lease)
    assert tier.problems() == []
    assert client.exists([key_of(1), key_of(2)]).present == [True, False]
    assert fetch(client, [key_of(1)])[1] == {0: payload_of(1)}, "nothing else is lost"


def test_a_commit_is_of_all_its_leases_or_of_none_and_of_no_lease_for_reading(
    tier, client, stub, token
):
    client.put(blob_of(3))
    request = pb.AcquireRequest(keys=[key_of(3)], lease_ms=60_000, shared_token=token)
    (read,) = stub.Acquire(request).extents
    first, second = reserve(stub, token, 1, 2, lease_ms=60_000).extents
    with open(tier.store.shared.path, "r+b") as file:
        for extent, number in ((first, 1), (second, 2)):
            file.seek(extent.offset)
            file.write(payload_of(number))
    for wrong in (7, first.lease, read.lease):
        with failing(OVER):
            commit(stub, first.lease, wrong)
    assert client.exists([key_of(1)]).leading_run == 0
    assert commit(stub, first.lease, second.lease).stored == 2
    assert fetch(client, [key_of(1), key_of(2)])[1] == {0: payload_of(1), 1: payload_of(2)}
    wait_for(lambda: len(tier.server.service.leases) == 1)
    assert tier.problems() != [], "what is read is held"
    stub.Release(pb.ReleaseRequest(leases=[read.lease]))
    assert tier.problems() == []


def test_equal_keys_share_a_lease_and_all_of_them_land(tier, client, stub, token):
    client.put(blob_of(1))
    request = pb.AcquireRequest(keys=[key_of(1)] * 100 + [key_of(2)], shared_token=token)
    extents = stub.Acquire(request).extents
    assert len(extents) == 100
    assert len({extent.lease for extent in extents}) == len(tier.server.service.leases) == 1
    stub.Release(pb.ReleaseRequest(leases=[extent.lease for extent in extents]))
    assert len(tier.server.service.leases) == 0
    assert fetch(client, [key_of(1)] * 3)[1] == dict.fromkeys(range(3), payload_of(1))


def test_a_client_that_is_killed_pins_no_memory(tier):
    script = f"""
import os, signal, sys
sys.path[:0] = {sys.path!r}
from live_tier import blob_of, header_of, key_of
from kvtier.tier.client import TierClient
from kvtier.v1 import tier_pb2 as pb
client = TierClient({tier.address!r}, timeout_s={SAFETY_S})
client.connect()
token = client._shared.token
client.put(blob_of(1))
stub = client._stub
header = header_of(blob_of(2))
stub.Reserve(pb.ReserveRequest(headers=[header], lease_ms=300, shared_token=token))
stub.Acquire(pb.AcquireRequest(keys=[key_of(1)], lease_ms=300, shared_token=token))
def half():
    yield pb.PutRequest(header=header_of(blob_of(3)))
    os.kill(os.getpid(), signal.SIGKILL)
stub.Put(half())
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=SAFETY_S)
    assert done.returncode == -9
    wait_for(lambda: tier.problems() == [])
    assert tier.server.service.leases.expired == 2


def test_a_lease_lasts_as_long_as_asked_for_and_never_longer_than_a_minute(stub, token):
    for asked, got in ((0, 10_000), (1234, 1234), (1 << 31, 60_000)):
        answer = reserve(stub, token, 1, lease_ms=asked)
        assert answer.expires_ms == got
        stub.Release(pb.ReleaseRequest(leases=[extent.lease for extent in answer.extents]))


def test_a_writer_that_was_asleep_until_its_lease_was_over_writes_nothing(tier, monkeypatch):
    """The room of the lease may be another blob's by then."""
    real_copy, late = shared.copy, []

    def copy_late(pieces, into, **options):
        wait_for(lambda: tier.server.service.leases.expired == 1)
        late.append(bytes(into))
        try:
            real_copy(pieces, into, **options)
        finally:
            assert bytes(into) == late[0]

    with TierClient(tier.address, timeout_s=0.2) as client:
        client.connect()
        monkeypatch.setattr(shared, "copy", copy_late)
        with pytest.raises(TierUnavailableError, match="lease"):
            client.put(blob_of(1))
        assert late
        monkeypatch.undo()
        client.connect()
        assert client.put(blob_of(1))


def test_room_that_could_not_be_filled_or_committed_is_given_back_at_once(
    tier, client, stub, token, monkeypatch
):
    real_commit, committed = tier.store.commit, []

    def fail(*_, **__):
        raise ZeroDivisionError("a bug")

    async def fail_second(draft):
        if committed:
            await tier.store.abort(draft)
            raise TierUnavailableError("the medium fails")
        committed.append(draft)
        await real_commit(draft)

    monkeypatch.setattr(shared, "copy", fail)
    with pytest.raises(ZeroDivisionError):
        client.put(blob_of(1))
    assert tier.problems() == []
    monkeypatch.setattr(tier.store, "commit", fail_second)
    leases = [extent.lease for extent in reserve(stub, token, 1, 2, 3, 4).extents]
    with failing(grpc.StatusCode.UNAVAILABLE):
        commit(stub, *leases)
    assert tier.problems() == []
    assert tier.server.service.leases.expired == 0


def test_a_client_of_an_earlier_service_can_use_neither_its_memory_nor_its_leases(tmp_path):
    """It finds out at its next call, connects again, and goes on."""
    directory = tmp_path / "shm"
    directory.mkdir()
    flags = ("--shared-memory", str(directory), "--memory", "1m")
    with (
        live_tier(tmp_path, *flags) as tier,
        connected(tier) as client,
        raw_stub(tier.address) as stub,
    ):
        assert client.put(blob_of(1))
        (old,) = directory.iterdir()
        (lease,) = (extent.lease for extent in reserve(stub, client._shared.token, 5).extents)
        tier.kill()
        tier.start()
        (new,) = directory.iterdir()
        assert new != old, "the file of the killed one is gone"
        wait_for(lambda: answers(client))
        blank = new.read_bytes()[4096:]
        with pytest.raises(TierUnavailableError, match="connect again"):
            client.put(blob_of(2))
        with pytest.raises(TierUnavailableError, match="connect again"):
            fetch(client, [key_of(1)])
        assert new.read_bytes()[4096:] == blank
        client.connect()
        assert client.put(blob_of(2))
        assert fetch(client, [key_of(1), key_of(2)])[1] == {1: payload_of(2)}
        with raw_stub(tier.address) as stub_of_new:
            (mine,) = reserve(stub_of_new, client._shared.token, 1).extents
            with failing(OVER):
                commit(stub_of_new, lease)
            stub_of_new.Release(pb.ReleaseRequest(leases=[lease]))
            assert commit(stub_of_new, mine.lease).stored == 1
        assert tier.terminate() == 0
        assert list(directory.iterdir()) == []


def answers(client):
    try:
        client.stats()
    except TierUnavailableError:
        return False
    return True

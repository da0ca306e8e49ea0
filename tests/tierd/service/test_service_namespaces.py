"""The owners of blobs: namespaces, their quotas, their share of transfers and their rates."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace

import grpc
import pytest
from live_tier import (
    blob_of,
    failing,
    fetch,
    header_of,
    in_process,
    key_of,
    payload_of,
    raw_stub,
    stalled_put,
)
from waiting import SAFETY_S, FakeClock, wait_for

from kvtier.errors import TierExhaustedError, TierRefusedError
from kvtier.tier.client import Landing, TierClient
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd import limits as limits_module
from kvtier_tierd.limits import PACED_CHUNK_BYTES, REFUSAL_S, Limits

PAGE = 4096


def test_namespaces_never_see_each_others_blobs(tier):
    ada = TierClient(tier.address, "ada", timeout_s=SAFETY_S)
    bob = TierClient(tier.address, "bob", timeout_s=SAFETY_S)
    with ada, bob:
        ada.connect(), bob.connect()
        assert ada.put(blob_of(1))
        assert bob.exists([key_of(1)]).leading_run == 0
        assert fetch(bob, [key_of(1)])[0] == [Landing.MISSING]
        assert bob.delete([key_of(1)]) == 0
        assert bob.put(blob_of(1))
        assert bob.delete([key_of(1)]) == 1
        assert fetch(ada, [key_of(1)])[1] == {0: payload_of(1)}
        assert (ada.stats().namespace_bytes, bob.stats().namespace_bytes) == (3 * PAGE, 0)


def test_anothers_lease_cannot_be_used(tier):
    blob = blob_of(1)
    ada, bob = [("kvtier-namespace", "ada")], [("kvtier-namespace", "bob")]
    with raw_stub(tier.address) as stub:
        token = stub.GetServerInfo(pb.GetServerInfoRequest()).shared_token
        request = pb.ReserveRequest(headers=[header_of(blob, "ada")], shared_token=token)
        lease = stub.Reserve(request, metadata=ada).extents[0].lease
        with failing(grpc.StatusCode.FAILED_PRECONDITION):
            stub.Commit(pb.CommitRequest(leases=[lease]), metadata=bob)
        stub.Release(pb.ReleaseRequest(leases=[lease]), metadata=bob)
        stub.Commit(pb.CommitRequest(leases=[lease]), metadata=ada)
        assert stub.Exists(pb.ExistsRequest(keys=[blob.key]), metadata=ada).leading_run == 1


def test_a_namespace_that_is_not_served_is_refused():
    with in_process(namespaces={"ada": Limits()}) as tier:
        for name in ("bob", "default"):
            with (
                TierClient(tier.address, name, timeout_s=SAFETY_S) as client,
                pytest.raises(TierRefusedError),
            ):
                client.connect()
        with TierClient(tier.address, "ada", timeout_s=SAFETY_S) as client:
            assert client.connect().namespace == "ada"


@pytest.mark.parametrize("name", ["", "x" * 201])
def test_a_namespace_that_cannot_be_is_refused(tier, name):
    with raw_stub(tier.address) as stub, failing(grpc.StatusCode.PERMISSION_DENIED):
        stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=[("kvtier-namespace", name)])


@pytest.mark.parametrize("shared", [True, False])
def test_a_quota_is_hard_and_evicts_only_its_own(memory_directory, shared):
    limits = {"ada": Limits(quota_bytes=10 * PAGE), "bob": Limits()}
    with in_process(namespaces=limits, shared_directory=memory_directory) as tier:
        ada = TierClient(tier.address, "ada", shared=shared, timeout_s=SAFETY_S)
        bob = TierClient(tier.address, "bob", shared=shared, timeout_s=SAFETY_S)
        with ada, bob:
            ada.connect(), bob.connect()
            for number in range(20):
                bob.put(blob_of(number, PAGE))
                ada.put(blob_of(number, PAGE))
                assert ada.stats().namespace_bytes <= 10 * PAGE
            assert ada.exists([key_of(n) for n in range(10, 20)]).leading_run == 10
            assert bob.exists([key_of(n) for n in range(20)]).leading_run == 20
            assert ada.stats().namespace_quota_bytes == 10 * PAGE
            with pytest.raises(TierExhaustedError, match="ada"):
                ada.put(blob_of(99, 11 * PAGE))
            assert ada.stats().namespace_bytes == 10 * PAGE
        assert tier.problems() == []


@pytest.fixture
def waited(monkeypatch) -> list[float]:
    """Record how long, in seconds, namespaces kept their clients waiting; no time passes
    otherwise."""
    clock, found = FakeClock(), []

    async def sleep(seconds: float) -> None:
        found.append(seconds)
        clock.now += seconds

    stand_in = SimpleNamespace(sleep=sleep, timeout=asyncio.timeout)
    monkeypatch.setattr(limits_module, "time", clock)
    monkeypatch.setattr(limits_module, "asyncio", stand_in)
    return found


def test_transfers_beyond_the_in_flight_limit_are_refused_and_others_are_not(waited):
    with (
        in_process(in_flight=2) as tier,
        raw_stub(tier.address) as stub,
        stalled_put(stub, 0) as (first, go_on_first),
        stalled_put(stub, 1) as (second, go_on_second),
    ):
        in_flight = tier.server.service.namespaces._in_flight
        wait_for(lambda: in_flight["default"] == 2)
        waited.clear()
        with failing(grpc.StatusCode.RESOURCE_EXHAUSTED):
            list(stub.Get(pb.GetRequest(keys=[key_of(1)])))
        # Refusals are slow, so that asking again and again is of no use to a client.
        assert waited == [REFUSAL_S]
        with failing(grpc.StatusCode.RESOURCE_EXHAUSTED):
            stub.Put(iter([pb.PutRequest(header=header_of(blob_of(3)))]))
        with TierClient(tier.address, "another", timeout_s=SAFETY_S) as other:
            assert other.put(blob_of(4))
        go_on_first.set(), go_on_second.set()
        assert first.result().stored
        assert second.result().stored
        wait_for(lambda: in_flight["default"] == 0)


def test_streams_of_a_namespace_keep_to_its_rate_and_others_do_not_wait(waited):
    rate, size = 1 << 20, 512 << 10
    limits = {"ada": Limits(bytes_per_s=rate), "bob": Limits()}
    with in_process(namespaces=limits) as tier, ExitStack() as stack:
        ada, bob = (
            stack.enter_context(TierClient(tier.address, name, timeout_s=SAFETY_S, shared=False))
            for name in limits
        )
        assert ada.connect().chunk_bytes == PACED_CHUNK_BYTES < bob.connect().chunk_bytes
        assert ada.put(blob_of(1, size))
        _, landed = fetch(ada, [key_of(1)])
        # The first chunk does not wait, and what the last one has to wait is the next one's.
        assert sum(waited) >= (2 * size - 2 * PACED_CHUNK_BYTES) / rate
        assert landed == {0: payload_of(1, size)}
        waited.clear()
        assert bob.put(blob_of(1, size))
        assert waited == []

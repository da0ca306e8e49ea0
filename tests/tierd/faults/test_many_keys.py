"""Calls about many keys: they have a limit, share leases, and keep nobody waiting."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import grpc
import pytest
from hoarders import INVALID
from live_tier import (
    blob_of,
    fetch,
    header_of,
    key_of,
    payload_of,
    raw_stub,
)
from waiting import SAFETY_S, wait_for

from kvtier.tier.client import Landing, TierClient
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.service.requests import MAX_HELD_KEYS, MAX_KEYS


def test_more_keys_than_a_call_may_hold_are_refused_naming_them_and_the_limit(tier):
    keys, leases = [key_of(1)] * (MAX_HELD_KEYS + 1), [7] * (MAX_HELD_KEYS + 1)
    headers = [header_of(blob_of(1))] * (MAX_HELD_KEYS + 1)
    token = tier.server.service.shared.token
    with raw_stub(tier.address) as stub:
        for name, call in (
            ("keys", lambda: stub.Acquire(pb.AcquireRequest(keys=keys, shared_token=token))),
            ("keys", lambda: list(stub.Get(pb.GetRequest(keys=keys)))),
            ("keys", lambda: stub.Delete(pb.DeleteRequest(keys=keys))),
            ("keys", lambda: stub.Quarantine(pb.QuarantineRequest(keys=keys))),
            ("headers", lambda: stub.Reserve(
                pb.ReserveRequest(headers=headers, shared_token=token))),
            ("leases", lambda: stub.Commit(pb.CommitRequest(leases=leases))),
            ("leases", lambda: stub.Release(pb.ReleaseRequest(leases=leases))),
        ):  # fmt: skip
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is INVALID
            assert f"{name}: expected at most {MAX_HELD_KEYS}" in caught.value.details()


def test_equal_keys_share_a_lease_and_all_of_them_land(tier):
    token = tier.server.service.shared.token
    with TierClient(tier.address) as client, raw_stub(tier.address) as stub:
        client.connect()
        client.put(blob_of(1))
        request = pb.AcquireRequest(keys=[key_of(1)] * 100 + [key_of(2)], shared_token=token)
        extents = stub.Acquire(request).extents
        assert len(extents) == 100
        assert len({extent.lease for extent in extents}) == 1
        assert len(tier.server.service.leases) == 1
        stub.Release(pb.ReleaseRequest(leases=[extent.lease for extent in extents]))
        assert len(tier.server.service.leases) == 0
        outcome, landed = fetch(client, [key_of(1)] * 3)
        assert outcome == [Landing.LANDED] * 3
        assert landed == {position: payload_of(1) for position in range(3)}


@pytest.fixture
def no_garbage_collection():
    """Of all that the test's process has imported: the service's own has no such pauses."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
def test_no_call_about_many_keys_keeps_the_others_waiting(tier):
    """In processor time of the event loop's thread, whatever else this machine is at."""
    token = tier.server.service.shared.token
    longest = [0.0]

    async def watch():
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            longest[0] = max(longest[0], now - last)
            last = now

    many = [key_of(number) for number in range(MAX_KEYS)]
    with TierClient(tier.address, timeout_s=30.0) as client, raw_stub(tier.address) as stub:
        client.connect()
        for number in range(2000):
            client.put(blob_of(number, 10))
        watching = tier.call(lambda: asyncio.ensure_future(watch()))
        stub.Exists(pb.ExistsRequest(keys=many))
        held = many[:MAX_HELD_KEYS]
        leases = [
            extent.lease
            for extent in stub.Acquire(
                pb.AcquireRequest(keys=held, shared_token=token, lease_ms=60_000)
            ).extents
        ]
        assert len(leases) == 2000
        stub.Release(pb.ReleaseRequest(leases=leases))
        assert stub.Delete(pb.DeleteRequest(keys=held)).deleted == 2000
        tier.call(watching.cancel)
    assert longest[0] < 0.04


def test_an_acquire_that_is_cancelled_leaves_nothing_leased(tier, monkeypatch):
    with TierClient(tier.address) as client, raw_stub(tier.address) as stub:
        client.connect()
        for number in range(4):
            client.put(blob_of(number))
        real, reached = tier.store.open, threading.Event()

        async def slow(name):
            if name.key == key_of(3):
                reached.set()
                await asyncio.Event().wait()
            return await real(name)

        monkeypatch.setattr(tier.store, "open", slow)
        token = tier.server.service.shared.token
        keys = [key_of(number) for number in range(4)]
        request = pb.AcquireRequest(keys=keys, shared_token=token, lease_ms=60_000)
        call = stub.Acquire.future(request)
        assert reached.wait(SAFETY_S)
        call.cancel()
        wait_for(lambda: tier.problems() == [])

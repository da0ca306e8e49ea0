"""Calls about many keys: they have a limit, share leases, and keep nobody waiting."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from live_tier import blob_of, fetch, header_of, key_of, payload_of, raw_stub
from waiting import SAFETY_S, wait_for

from kvtier.tier.client import Landing, TierClient
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.service.requests import MAX_HELD_KEYS, MAX_KEYS

INVALID = grpc.StatusCode.INVALID_ARGUMENT


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
    with TierClient(tier.address, timeout_s=SAFETY_S) as client, raw_stub(tier.address) as stub:
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


def test_no_call_about_many_keys_keeps_the_others_waiting(tier, monkeypatch):
    """The store is asked about some of them only between two turns of the event loop."""
    store, token = tier.store, tier.server.service.shared.token
    most, since = Counter[str](), Counter[str]()

    def asked(what: str, keys: int) -> None:
        since[what] += keys
        most[what] = max(most[what], since[what])

    async def watch() -> None:
        while True:
            await asyncio.sleep(0)
            since.clear()

    def count(what: str, keys: Callable[[Any], int]) -> None:
        real = getattr(store, what)

        def counting(about: Any) -> Any:
            asked(what, keys(about))
            return real(about)

        monkeypatch.setattr(store, what, counting)

    count("exists", len)
    for what in ("open", "delete"):
        count(what, lambda _: 1)
    leases_dropped = tier.server.service.leases._drop

    async def dropping(lease) -> None:
        asked("release", 1)
        await leases_dropped(lease)

    monkeypatch.setattr(tier.server.service.leases, "_drop", dropping)
    many = [key_of(number) for number in range(MAX_KEYS)]
    with TierClient(tier.address, timeout_s=SAFETY_S) as client, raw_stub(tier.address) as stub:
        client.connect()
        for number in range(2000):
            client.put(blob_of(number, 10))
        most.clear()
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
    # So many keys take some milliseconds.
    assert most == {"exists": 2048, "open": 64, "release": 64, "delete": 256}


def test_an_acquire_that_is_cancelled_leaves_nothing_leased(tier, monkeypatch):
    with TierClient(tier.address, timeout_s=SAFETY_S) as client, raw_stub(tier.address) as stub:
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

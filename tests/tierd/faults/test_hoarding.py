"""Clients that take and do not use: a put or a get that does not come to an end is ended, and no
memory is theirs alone: it has shares and budgets, and many readers have one copy.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace

import grpc
import pytest
from live_tier import (
    blob_of,
    connected,
    failing,
    fetch,
    header_of,
    in_process,
    key_of,
    payload_of,
    raw_stub,
    stalled_put,
    whose,
)
from waiting import SAFETY_S, wait_for

from kvtier.tier.client import Landing
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.limits import Limits
from kvtier_tierd.stores.disk.store import DiskOptions

MIB = 1 << 20
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def nothing_held(tier):
    return tier.problems() == [] and tier.transfers() == 0


# ---- puts that do not come to an end


@pytest.mark.parametrize("sent_bytes", [0, 13 * MIB])
def test_a_put_takes_room_from_others_when_all_of_it_is_there_and_not_before(sent_bytes):
    with in_process() as tier, raw_stub(tier.address) as stub, connected(tier, "ada") as ada:
        keys = [key_of(number) for number in range(12)]
        for number in range(12):
            ada.put(blob_of(number, MIB))
        with stalled_put(stub, 99, 14 * MIB, sent_bytes, "bob") as (call, go_on):
            wait_for(lambda: tier.transfers("bob") == 1)
            wait_for(lambda: tier.server.budget.used_bytes == sent_bytes)
            assert ada.exists(keys).leading_run == 12
            assert tier.store.account.reserved.total() == 0
            go_on.set()
            assert call.result(SAFETY_S).stored
        assert sum(ada.exists(keys).present) <= 2
        assert tier.problems() == []


def test_a_put_that_can_never_be_stored_is_refused_by_its_header():
    own = {"ada": Limits(quota_bytes=4 * MIB), "bob": Limits()}
    with in_process(namespaces=own) as tier, raw_stub(tier.address) as stub:
        for namespace, num_bytes in (("ada", 5 * MIB), ("bob", 17 * MIB)):
            with stalled_put(stub, 1, num_bytes, 0, namespace) as (call, _):
                assert call.exception(SAFETY_S).code() is EXHAUSTED


@pytest.mark.parametrize("stalls", ["at once", "after the header", "after a chunk", "drips"])
def test_a_put_that_stalls_or_drips_is_over_soon(stalls):
    with in_process(stall_s=0.3) as tier, raw_stub(tier.address) as stub:
        over = threading.Event()

        def requests():
            if stalls != "at once":
                yield pb.PutRequest(header=header_of(blob_of(1, 4 * MIB)))
            if stalls == "after a chunk":
                yield pb.PutRequest(chunk=bytes(MIB))
            while not over.wait(0.03 if stalls == "drips" else SAFETY_S):
                yield pb.PutRequest(chunk=b"x")

        call = stub.Put.future(requests())
        assert call.exception(SAFETY_S).code() is UNAVAILABLE
        assert "0.3 s" in call.exception().details()
        over.set()
        wait_for(lambda: nothing_held(tier))


def test_many_small_chunks_are_one_payload():
    payload = payload_of(1, 20_000)
    with in_process(stall_s=SAFETY_S) as tier, raw_stub(tier.address) as stub:
        header = pb.PutRequest(header=header_of(blob_of(1, 20_000)))
        chunks = [pb.PutRequest(chunk=payload[at : at + 5]) for at in range(0, 20_000, 5)]
        assert stub.Put(iter([header, *chunks])).stored
        with connected(tier) as client:
            assert fetch(client, [key_of(1)])[1] == {0: payload}


# ---- gets that are not read


def running_gets(tier):
    return tier.call(
        lambda: sum("/Get]" in task.get_name() for task in tier.server.service.running)
    )


def stalled_gets(tier):
    """Return the number of gets that were given up because their client did not read."""
    return tier.server.metrics._errors.labels("Get", UNAVAILABLE.name)._value.get()


def test_a_get_that_is_not_read_is_over_soon_and_pins_nothing(caplog):
    with in_process() as tier, raw_stub(tier.address) as stub:
        with connected(tier) as client:
            client.put(blob_of(1, 14 * MIB))
        service = tier.server.service
        service.options = replace(service.options, stall_s=0.2)
        more_than_any_window = pb.GetRequest(keys=[key_of(1)] * 16)
        call = stub.Get(more_than_any_window)
        wait_for(lambda: running_gets(tier) == 1)
        wait_for(lambda: tier.problems() == [])
        with failing(UNAVAILABLE):
            list(call)
        wait_for(lambda: not running_gets(tier))
        wait_for(lambda: nothing_held(tier))
        # gRPC fails the message on its way before it cancels the call, or after: some of each.
        for _ in range(6):
            stalled = stalled_gets(tier)
            gone = stub.Get(more_than_any_window)
            wait_for(lambda n=stalled: stalled_gets(tier) > n)
            wait_for(lambda: tier.problems() == [])
            assert running_gets(tier) == tier.transfers() == 1, "until it reads, or goes"
            gone.cancel()
            wait_for(lambda: not tier.server.service.running)
            wait_for(lambda: nothing_held(tier))
    assert caplog.records == [], "it is no bug of ours"
    assert stalled_gets(tier) == 7


def test_gets_that_are_not_read_are_in_flight_until_they_are_over_and_that_they_are_at_the_end():
    with in_process(in_flight=2) as tier, raw_stub(tier.address) as stub:
        with connected(tier) as client:
            client.put(blob_of(1, 14 * MIB))
        service = tier.server.service
        service.options = replace(service.options, stall_s=0.2)
        calls = [stub.Get(pb.GetRequest(keys=[key_of(1)] * 16)) for _ in range(2)]
        wait_for(lambda: stalled_gets(tier) == len(calls))
        wait_for(lambda: tier.problems() == [])
        with failing(EXHAUSTED, "2 transfers in flight"):
            list(stub.Get(pb.GetRequest(keys=[key_of(9)])))
        tier.shut_down()
        assert tier.transfers() == running_gets(tier) == 0


# ---- room in the shared memory


def test_a_namespace_reserves_a_part_of_the_memory_and_all_together_not_all_of_it(
    tier, stub, token
):
    with connected(tier, "ada", shared=False) as ada:
        for number in range(8):
            ada.put(blob_of(number, MIB))

        def reserve(namespace, numbers, num_bytes):
            headers = [header_of(blob_of(n, num_bytes), namespace) for n in numbers]
            request = pb.ReserveRequest(headers=headers, lease_ms=60_000, shared_token=token)
            return [e.lease for e in stub.Reserve(request, metadata=whose(namespace)).extents]

        def release(namespace, leases):
            stub.Release(pb.ReleaseRequest(leases=leases), metadata=whose(namespace))

        held = {name: reserve(name, range(100, 116), MIB) for name in ("bob", "eve")}
        assert [len(leases) for leases in held.values()] == [4, 4], "a quarter each"
        assert ada.exists([key_of(number) for number in range(8)]).leading_run == 8
        with failing(EXHAUSTED):
            reserve("bob", [1], 5000)
        held["carl"] = reserve("carl", range(1), MIB)
        with failing(EXHAUSTED):
            reserve("mallory", [1], 5000)
        release("bob", held.pop("bob"))
        held["mallory"] = reserve("mallory", [1], 5000)
        assert len(held["mallory"]) == 1
        for name, leases in held.items():
            release(name, leases)
        large = reserve("bob", [1, 2], 10 * MIB)
        assert len(large) == 1, "one blob may be larger than that"
        release("bob", large)


# ---- memory for what is on its way


def test_what_puts_have_sent_is_within_the_budget_and_beyond_it_refused():
    options = {"transfer_bytes": 8 * MIB, "max_blob_bytes": 4 * MIB}
    with in_process(**options) as tier, raw_stub(tier.address) as stub, ExitStack() as stack:
        budget = tier.server.budget
        for number, namespace in enumerate(("ada", "bob")):
            put = stalled_put(stub, number, 4 * MIB, 3 * MIB, namespace)
            stack.enter_context(put)
        wait_for(lambda: budget.used_bytes == 6 * MIB)
        with stalled_put(stub, 9, 3 * MIB, 2 * MIB, "ada") as (call, _):
            assert call.exception(SAFETY_S).code() is EXHAUSTED, "no namespace has more than half"
        with stalled_put(stub, 9, 4 * MIB, 4 * MIB, "eve") as (call, _):
            assert call.exception(SAFETY_S).code() is EXHAUSTED
            assert "--transfer-memory" in call.exception().details()
        assert budget.used_bytes == 6 * MIB
        stack.close()
        wait_for(lambda: budget.used_bytes == 0)
        with connected(tier) as client:
            assert client.put(blob_of(9, 4 * MIB))


def test_readers_of_a_blob_on_disk_share_one_copy_of_it(tmp_path, monkeypatch):
    """Each with one of its own, 24 of them made a service 1.5 GiB larger with a blob of 64 MiB."""
    options = {"transfer_bytes": 32 * MIB, "max_blob_bytes": 16 * MIB}
    with (
        in_process(store=DiskOptions(tmp_path), **options) as tier,
        raw_stub(tier.address) as stub,
        connected(tier) as client,
    ):
        for number in range(3):
            client.put(blob_of(number, 12 * MIB))
        reads, real = [], tier.store._medium.read
        monkeypatch.setattr(
            tier.store._medium, "read", lambda row: reads.append(row.file) or real(row)
        )
        calls = [stub.Get(pb.GetRequest(keys=[key_of(1)])) for _ in range(24)]
        for call in calls:
            assert next(call).header.num_bytes == 12 * MIB
        assert len(reads) == 1
        assert tier.server.budget.used_bytes == 12 * MIB
        with failing(EXHAUSTED):
            list(stub.Get(pb.GetRequest(keys=[key_of(2)])))
        for call in calls[1:]:
            call.cancel()
        rest = b"".join(response.chunk for response in calls[0])
        assert rest == payload_of(1, 12 * MIB), "the others' going is nothing to it"
        wait_for(lambda: tier.problems() == [])
        assert fetch(client, [key_of(2)])[0] == [Landing.LANDED]

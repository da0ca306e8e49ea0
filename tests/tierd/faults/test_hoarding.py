"""Clients that take and do not use: room, memory and time that are not theirs are not to be had."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from contextlib import ExitStack, contextmanager

import grpc
import pytest
from live_tier import (
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

from kvtier.errors import TierExhaustedError, UsageError
from kvtier.tier.client import Landing, TierClient
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.limits.namespaces import Limits
from kvtier_tierd.options import TierOptions
from kvtier_tierd.service.requests import MAX_HELD_KEYS, MAX_KEYS
from kvtier_tierd.stores.disk.options import DiskOptions

MIB = 1 << 20
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def whose(namespace):
    return [("kvtier-namespace", namespace)]


@contextmanager
def stalled_put(stub, number, num_bytes, sent_bytes, namespace="default"):
    """A put of which only the first bytes come while the block lasts; yields the call."""
    payload, go_on = payload_of(number, num_bytes), threading.Event()

    def parts():
        header = header_of(blob_of(number, num_bytes), namespace)
        yield pb.PutRequest(header=header)
        for begin in range(0, sent_bytes, MIB):
            yield pb.PutRequest(chunk=payload[begin : min(begin + MIB, sent_bytes)])
        go_on.wait(30)
        for begin in range(sent_bytes, num_bytes, MIB):
            yield pb.PutRequest(chunk=payload[begin : begin + MIB])

    call = stub.Put.future(parts(), metadata=whose(namespace))
    try:
        yield call, go_on
    finally:
        call.cancel()
        go_on.set()


def transfers(tier, namespace="default"):
    return tier.server.service.namespaces._in_flight[namespace]


# ---- puts that do not come to an end


@pytest.mark.parametrize("sent_bytes", [0, 13 * MIB])
def test_a_put_takes_room_from_others_when_all_of_it_is_there_and_not_before(sent_bytes):
    with in_process() as tier, raw_stub(tier.address) as stub, ExitStack() as stack:
        ada = stack.enter_context(TierClient(tier.address, "ada", timeout_s=10.0))
        for number in range(12):
            ada.put(blob_of(number, MIB))
        keys = [key_of(number) for number in range(12)]
        with stalled_put(stub, 99, 14 * MIB, sent_bytes, "bob") as (call, go_on):
            eventually(lambda: transfers(tier, "bob") == 1)
            eventually(lambda: tier.server.budget.used_bytes == sent_bytes)
            assert ada.exists(keys).leading_run == 12
            assert tier.store.account.reserved.total() == 0
            go_on.set()
            assert call.result(20).stored
        assert sum(ada.exists(keys).present) <= 2
        assert tier.problems() == []


def test_a_put_that_can_never_be_stored_is_refused_by_its_header():
    limits = {"ada": Limits(quota_bytes=4 * MIB), "bob": Limits()}
    with in_process(namespaces=limits) as tier, raw_stub(tier.address) as stub:
        for namespace, num_bytes in (("ada", 5 * MIB), ("bob", 17 * MIB)):
            with stalled_put(stub, 1, num_bytes, 0, namespace) as (call, _):
                assert call.exception(10).code() is EXHAUSTED


@pytest.mark.parametrize("parts", [0, 1, 2])
def test_a_put_that_stalls_is_over_soon(parts):
    """Before its header, after it, and after a chunk."""
    with in_process(stall_s=0.3) as tier, raw_stub(tier.address) as stub:
        go_on = threading.Event()

        def requests():
            yield from [
                pb.PutRequest(header=header_of(blob_of(1, 4 * MIB))),
                pb.PutRequest(chunk=bytes(MIB)),
            ][:parts]
            go_on.wait(20)

        call = stub.Put.future(requests())
        assert call.exception(10).code() is UNAVAILABLE
        assert "0.3 s" in call.exception().details()
        go_on.set()
        eventually(lambda: tier.problems() == [] and transfers(tier) == 0)


def test_a_put_that_drips_is_over_soon_as_well():
    with in_process(stall_s=0.5) as tier, raw_stub(tier.address) as stub:
        over = threading.Event()

        def requests():
            yield pb.PutRequest(header=header_of(blob_of(1, 4 * MIB)))
            while not over.wait(0.05):
                yield pb.PutRequest(chunk=b"x")

        call = stub.Put.future(requests())
        assert call.exception(10).code() is UNAVAILABLE
        over.set()
        eventually(lambda: tier.problems() == [] and transfers(tier) == 0)


def test_a_namespace_with_a_rate_is_not_cut_off_for_keeping_to_it():
    limits = {"ada": Limits(bytes_per_s=1 << 19)}
    with (
        in_process(namespaces=limits, stall_s=0.2) as tier,
        TierClient(tier.address, "ada", timeout_s=20.0, shared=False) as client,
    ):
        client.connect()
        assert client.put(blob_of(1, 1 << 19))
        assert fetch(client, [key_of(1)])[1] == {0: payload_of(1, 1 << 19)}


def test_many_small_chunks_cost_little_more_than_they_are():
    payload = payload_of(1, 20_000)
    with in_process() as tier, raw_stub(tier.address) as stub:
        header = pb.PutRequest(header=header_of(blob_of(1, 20_000)))
        chunks = [pb.PutRequest(chunk=payload[at : at + 1]) for at in range(20_000)]
        assert stub.Put(iter([header, *chunks])).stored
        with TierClient(tier.address) as client:
            assert fetch(client, [key_of(1)])[1] == {0: payload}


# ---- gets that are not read


def test_a_get_that_is_not_read_is_over_soon_and_pins_nothing(caplog):
    with in_process(stall_s=0.1) as tier, raw_stub(tier.address) as stub:
        with TierClient(tier.address, timeout_s=10.0) as client:
            client.put(blob_of(1, 14 * MIB))
        call = stub.Get(pb.GetRequest(keys=[key_of(1)]))
        eventually(lambda: any(e.pins for e in tier.store.account.entries.values()))
        eventually(lambda: tier.problems() == [] and transfers(tier) == 0)
        with failing(UNAVAILABLE):
            list(call)
        # gRPC fails the message on its way before it cancels the call, or after: some of each.
        for _ in range(12):
            gone = stub.Get(pb.GetRequest(keys=[key_of(1)] * 16))  # more than any window
            next(gone)
            eventually(lambda: transfers(tier) == 1)
            eventually(lambda: tier.problems() == [] and transfers(tier) == 0)
            assert len(tier.server.service.calls.running) == 1, "until it reads, or goes"
            gone.cancel()
            eventually(lambda: not tier.server.service.calls.running)
    assert caplog.records == [], "it is no bug of ours"
    assert ("Get", UNAVAILABLE.name) in tier.server.metrics._errors._metrics


# ---- room in the shared memory


def test_a_namespace_reserves_a_part_of_the_memory_and_all_together_not_all_of_it(tier):
    stub_of = raw_stub(tier.address)
    token = tier.server.service.shared.token
    with stub_of as stub, TierClient(tier.address, "ada", shared=False) as ada:
        for number in range(8):
            ada.put(blob_of(number, MIB))

        def reserve(namespace, numbers, num_bytes):
            headers = [header_of(blob_of(n, num_bytes), namespace) for n in numbers]
            request = pb.ReserveRequest(headers=headers, lease_ms=60_000, shared_token=token)
            return [e.lease for e in stub.Reserve(request, metadata=whose(namespace)).extents]

        held = {name: reserve(name, range(100, 116), MIB) for name in ("bob", "eve")}
        assert [len(leases) for leases in held.values()] == [4, 4], "a quarter each"
        assert ada.exists([key_of(number) for number in range(8)]).leading_run == 8
        with failing(EXHAUSTED):
            reserve("bob", [1], 5000)
        held["carl"] = reserve("carl", range(1), MIB)
        with failing(EXHAUSTED):
            reserve("mallory", [1], 5000)
        stub.Release(pb.ReleaseRequest(leases=held["bob"]), metadata=whose("bob"))
        held["mallory"] = reserve("mallory", [1], 5000)
        assert len(held["mallory"]) == 1
        for name in ("eve", "carl", "mallory"):
            stub.Release(pb.ReleaseRequest(leases=held[name]), metadata=whose(name))
        large = reserve("bob", [1, 2], 10 * MIB)
        assert len(large) == 1, "one blob may be larger than that"
        stub.Release(pb.ReleaseRequest(leases=large), metadata=whose("bob"))


# ---- memory for what is on its way


def test_what_puts_have_sent_is_within_the_budget_and_beyond_it_refused():
    options = {"transfer_bytes": 8 * MIB, "max_blob_bytes": 4 * MIB}
    with in_process(**options) as tier, raw_stub(tier.address) as stub, ExitStack() as stack:
        budget = tier.server.budget
        for number, namespace in enumerate(("ada", "bob")):
            put = stalled_put(stub, number, 4 * MIB, 3 * MIB, namespace)
            stack.enter_context(put)
        eventually(lambda: budget.used_bytes == 6 * MIB)
        with stalled_put(stub, 9, 3 * MIB, 2 * MIB, "ada") as (call, _):
            assert call.exception(10).code() is EXHAUSTED, "no namespace has more than half"
        with stalled_put(stub, 9, 4 * MIB, 4 * MIB, "eve") as (call, _):
            assert call.exception(10).code() is EXHAUSTED
            assert "--transfer-memory" in call.exception().details()
        assert budget.used_bytes == 6 * MIB
        stack.close()
        eventually(lambda: budget.used_bytes == 0)
        with TierClient(tier.address, timeout_s=10.0) as client:
            assert client.put(blob_of(9, 4 * MIB))


def test_readers_of_a_blob_on_disk_share_one_copy_of_it(tmp_path, monkeypatch):
    options = {"transfer_bytes": 32 * MIB, "max_blob_bytes": 16 * MIB}
    with (
        in_process(store=DiskOptions(tmp_path), **options) as tier,
        raw_stub(tier.address) as stub,
        TierClient(tier.address, timeout_s=10.0) as client,
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
        eventually(lambda: tier.problems() == [])
        assert fetch(client, [key_of(2)])[0] == [Landing.LANDED]


def resident_bytes(tier):
    with open(f"/proc/{tier.process.pid}/status") as status:
        (line,) = (line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def test_a_service_with_a_disk_grows_by_one_blob_for_many_who_do_not_read_it(tmp_path):
    """24 of them made it 1.5 GiB larger, of 64 MiB each; here they are a quarter of that."""
    flags = ("--store", "disk", "--disk-path", str(tmp_path / "disk"))
    size = 16 * MIB
    with (
        live_tier(tmp_path, *flags) as tier,
        raw_stub(tier.address) as stub,
        TierClient(tier.address, timeout_s=20.0) as client,
    ):
        client.connect()
        client.put(blob_of(1, size))
        before = resident_bytes(tier)
        calls = [stub.Get(pb.GetRequest(keys=[key_of(1)])) for _ in range(24)]
        for call in calls:
            next(call)
        # What gRPC holds of each stream is a chunk or two.
        assert resident_bytes(tier) - before < 24 * 4 * MIB + size
        for call in calls:
            call.cancel()


def test_a_budget_that_no_blob_fits_into_is_refused_naming_the_flag():
    with pytest.raises(UsageError, match="--transfer-memory: expected at least twice --max-blob"):
        TierOptions(transfer_bytes=2 * MIB - 1, max_blob_bytes=MIB)
    for stall_s in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="--stall-s"):
            TierOptions(stall_s=stall_s)


# ---- calls about many keys


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
                await asyncio.sleep(20)
            return await real(name)

        monkeypatch.setattr(tier.store, "open", slow)
        token = tier.server.service.shared.token
        keys = [key_of(number) for number in range(4)]
        request = pb.AcquireRequest(keys=keys, shared_token=token, lease_ms=60_000)
        call = stub.Acquire.future(request)
        assert reached.wait(10)
        call.cancel()
        eventually(lambda: tier.problems() == [])


def test_errors_of_a_stall_and_of_a_budget_reach_our_client_as_its_own():
    options = {"transfer_bytes": 4 * MIB, "max_blob_bytes": 2 * MIB, "stall_s": 0.3}
    with (
        in_process(**options) as tier,
        raw_stub(tier.address) as stub,
        stalled_put(stub, 1, 2 * MIB, 2 * MIB - 1) as (call, _),
    ):
        eventually(lambda: tier.server.budget.used_bytes > 0)
        with TierClient(tier.address) as client, pytest.raises(TierExhaustedError):
            client.put(blob_of(2, MIB))
        assert call.exception(10).code() is UNAVAILABLE

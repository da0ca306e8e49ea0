"""Clients that take and do not use: a put or a get that does not come to an end is ended, and no
memory is theirs alone: it has shares and budgets, and many readers have one copy.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from types import SimpleNamespace

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
    live_tier,
    payload_of,
    raw_stub,
    stalled_put,
    whose,
)
from waiting import SAFETY_S, FakeClock, wait_for

from kvtier.tier.client import Landing, TierClient
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd import limits
from kvtier_tierd.limits import Limits
from kvtier_tierd.stores.disk.store import DiskOptions

MIB = 1 << 20
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def transfers(tier, namespace="default"):
    return tier.server.service.namespaces._in_flight[namespace]


class Patience:
    """A service's patience with its clients, which runs out when a test says so, not by a clock."""

    def __init__(self, monkeypatch) -> None:
        self._waits: list[asyncio.Timeout] = []
        self._ran_out = 0
        stand_in = SimpleNamespace(timeout=self._timeout, sleep=asyncio.sleep)
        monkeypatch.setattr(limits, "asyncio", stand_in)

    @asynccontextmanager
    async def _timeout(self, _allowed_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.append(wait)
                try:
                    yield
                finally:
                    self._waits.remove(wait)
        except TimeoutError:
            self._ran_out += 1
            raise

    def runs_out(self, tier, stub) -> None:
        """Wait until the service waits for a client that does nothing, and end that wait."""
        before = self._ran_out

        def look() -> bool:
            if self._ran_out == before and self._is_blocked(tier, stub):
                tier.call(lambda: [wait.reschedule(0.0) for wait in self._waits])
            return self._ran_out > before

        wait_for(look)

    def _is_blocked(self, tier, stub) -> bool:
        """Return whether the service waits for the same message after other calls of that client
        have come and been answered: whatever had room was sent before them."""
        waits = tier.call(lambda: list(self._waits))
        for _ in range(3):
            stub.Exists(pb.ExistsRequest(keys=[key_of(1)]))
        return bool(waits) and tier.call(lambda: list(self._waits)) == waits


# ---- puts that do not come to an end


@pytest.mark.parametrize("sent_bytes", [0, 13 * MIB])
def test_a_put_takes_room_from_others_when_all_of_it_is_there_and_not_before(sent_bytes):
    with in_process() as tier, raw_stub(tier.address) as stub, ExitStack() as stack:
        ada = stack.enter_context(TierClient(tier.address, "ada", timeout_s=SAFETY_S))
        for number in range(12):
            ada.put(blob_of(number, MIB))
        keys = [key_of(number) for number in range(12)]
        with stalled_put(stub, 99, 14 * MIB, sent_bytes, "bob") as (call, go_on):
            wait_for(lambda: transfers(tier, "bob") == 1)
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


@pytest.mark.parametrize("parts", [0, 1, 2])
def test_a_put_that_stalls_is_over_soon(parts):
    """The put stalls before its header, after it, and after a chunk."""
    with in_process(stall_s=0.3) as tier, raw_stub(tier.address) as stub:
        go_on = threading.Event()

        def requests():
            yield from [
                pb.PutRequest(header=header_of(blob_of(1, 4 * MIB))),
                pb.PutRequest(chunk=bytes(MIB)),
            ][:parts]
            go_on.wait(SAFETY_S)

        call = stub.Put.future(requests())
        assert call.exception(SAFETY_S).code() is UNAVAILABLE
        assert "0.3 s" in call.exception().details()
        go_on.set()
        wait_for(lambda: tier.problems() == [] and transfers(tier) == 0)


def test_a_put_that_drips_is_over_soon_as_well():
    with in_process(stall_s=0.5) as tier, raw_stub(tier.address) as stub:
        over = threading.Event()

        def requests():
            yield pb.PutRequest(header=header_of(blob_of(1, 4 * MIB)))
            while not over.wait(0.05):
                yield pb.PutRequest(chunk=b"x")

        call = stub.Put.future(requests())
        assert call.exception(SAFETY_S).code() is UNAVAILABLE
        over.set()
        wait_for(lambda: tier.problems() == [] and transfers(tier) == 0)


def test_a_namespace_with_a_rate_is_not_cut_off_for_keeping_to_it(monkeypatch):
    """The rate's own pauses, of two minutes each way, are the only time that passes."""
    clock = FakeClock()

    async def sleep(seconds: float) -> None:
        clock.passes(seconds)

    monkeypatch.setattr(limits, "time", clock)
    stand_in = SimpleNamespace(sleep=sleep, timeout=asyncio.timeout)
    monkeypatch.setattr(limits, "asyncio", stand_in)
    with (
        in_process(namespaces={"ada": Limits(bytes_per_s=1 << 12)}, stall_s=60.0) as tier,
        connected(tier, "ada", shared=False) as client,
    ):
        assert client.put(blob_of(1, 1 << 19))
        assert fetch(client, [key_of(1)])[1] == {0: payload_of(1, 1 << 19)}
    assert clock.now > FakeClock().now + 2 * 60


def test_many_small_chunks_cost_little_more_than_they_are():
    payload = payload_of(1, 20_000)
    with in_process(stall_s=SAFETY_S) as tier, raw_stub(tier.address) as stub:
        header = pb.PutRequest(header=header_of(blob_of(1, 20_000)))
        chunks = [pb.PutRequest(chunk=payload[at : at + 1]) for at in range(20_000)]
        assert stub.Put(iter([header, *chunks])).stored
        with TierClient(tier.address, timeout_s=SAFETY_S) as client:
            assert fetch(client, [key_of(1)])[1] == {0: payload}


# ---- gets that are not read


def running_gets(tier):
    return tier.call(
        lambda: sum("/Get]" in task.get_name() for task in tier.server.service.calls.running)
    )


def test_a_get_that_is_not_read_is_over_soon_and_pins_nothing(caplog, monkeypatch):
    patience = Patience(monkeypatch)
    with in_process() as tier, raw_stub(tier.address) as stub:
        with TierClient(tier.address, timeout_s=SAFETY_S) as client:
            client.put(blob_of(1, 14 * MIB))
        more_than_any_window = pb.GetRequest(keys=[key_of(1)] * 16)
        call = stub.Get(more_than_any_window)
        patience.runs_out(tier, stub)
        wait_for(lambda: tier.problems() == [] and transfers(tier) == 0)
        with failing(UNAVAILABLE):
            list(call)
        wait_for(lambda: not running_gets(tier))
        # gRPC fails the message on its way before it cancels the call, or after: some of each.
        for _ in range(12):
            gone = stub.Get(more_than_any_window)
            next(gone)
            patience.runs_out(tier, stub)
            wait_for(lambda: tier.problems() == [] and transfers(tier) == 0)
            assert running_gets(tier) == 1, "until it reads, or goes"
            gone.cancel()
            wait_for(lambda: not tier.server.service.calls.running)
    assert caplog.records == [], "it is no bug of ours"
    assert ("Get", UNAVAILABLE.name) in tier.server.metrics._errors._metrics


# ---- room in the shared memory


def test_a_namespace_reserves_a_part_of_the_memory_and_all_together_not_all_of_it(tier):
    stub_of = raw_stub(tier.address)
    token = tier.server.service.shared.token
    with stub_of as stub, TierClient(tier.address, "ada", shared=False, timeout_s=SAFETY_S) as ada:
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
        wait_for(lambda: budget.used_bytes == 6 * MIB)
        with stalled_put(stub, 9, 3 * MIB, 2 * MIB, "ada") as (call, _):
            assert call.exception(SAFETY_S).code() is EXHAUSTED, "no namespace has more than half"
        with stalled_put(stub, 9, 4 * MIB, 4 * MIB, "eve") as (call, _):
            assert call.exception(SAFETY_S).code() is EXHAUSTED
            assert "--transfer-memory" in call.exception().details()
        assert budget.used_bytes == 6 * MIB
        stack.close()
        wait_for(lambda: budget.used_bytes == 0)
        with TierClient(tier.address, timeout_s=SAFETY_S) as client:
            assert client.put(blob_of(9, 4 * MIB))


def test_readers_of_a_blob_on_disk_share_one_copy_of_it(tmp_path, monkeypatch):
    options = {"transfer_bytes": 32 * MIB, "max_blob_bytes": 16 * MIB}
    with (
        in_process(store=DiskOptions(tmp_path), **options) as tier,
        raw_stub(tier.address) as stub,
        TierClient(tier.address, timeout_s=SAFETY_S) as client,
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
        connected(tier) as client,
    ):
        client.put(blob_of(1, size))
        before = resident_bytes(tier)
        calls = [stub.Get(pb.GetRequest(keys=[key_of(1)])) for _ in range(24)]
        for call in calls:
            next(call)
        # gRPC holds a chunk or two of each stream.
        assert resident_bytes(tier) - before < 24 * 4 * MIB + size
        for call in calls:
            call.cancel()

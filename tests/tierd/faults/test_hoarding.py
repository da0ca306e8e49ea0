"""Clients that take and do not use: a put or a get that does not come to an end is ended."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from hoarders import EXHAUSTED, MIB, UNAVAILABLE, Patience, stalled_put, transfers
from live_tier import (
    blob_of,
    failing,
    fetch,
    header_of,
    in_process,
    key_of,
    payload_of,
    raw_stub,
)
from waiting import SAFETY_S, FakeClock, wait_for

from kvtier.tier.client import TierClient
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd import limits
from kvtier_tierd.limits import Limits

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
        TierClient(tier.address, "ada", timeout_s=SAFETY_S, shared=False) as client,
    ):
        client.connect()
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

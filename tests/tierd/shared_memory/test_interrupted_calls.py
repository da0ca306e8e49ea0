"""Calls that are cancelled, fail or are cut off in the middle: nothing stays held."""

from __future__ import annotations

import threading

import pytest
from live_tier import blob_of, connected, fetch, header_of, key_of, raw_stub
from waiting import SAFETY_S, wait_for

from kvtier.errors import TierUnavailableError, UsageError
from kvtier.tier.client import TierClient
from kvtier.v1 import tier_pb2 as pb

MIB = 1 << 20


def test_a_put_that_is_cancelled_anywhere_leaves_nothing_held(tier):
    with raw_stub(tier.address) as stub:
        for chunks in range(4):
            sent, go_on = threading.Event(), threading.Event()

            def parts(chunks=chunks, sent=sent, go_on=go_on):
                yield pb.PutRequest(header=header_of(blob_of(1, 4 * MIB)))
                for _ in range(chunks):
                    yield pb.PutRequest(chunk=bytes(MIB))
                sent.set()
                go_on.wait(SAFETY_S)

            call = stub.Put.future(parts())
            assert sent.wait(SAFETY_S)
            wait_for(lambda: tier.server.service.namespaces._in_flight["default"] == 1)
            call.cancel()
            wait_for(lambda: tier.problems() == [])
            go_on.set()
        assert stub.Exists(pb.ExistsRequest(keys=[key_of(1)])).leading_run == 0


def test_a_get_that_is_cancelled_anywhere_leaves_nothing_held(tier, client):
    client.put(blob_of(1, 4 * MIB))
    with raw_stub(tier.address) as stub:
        for responses in range(6):
            call = stub.Get(pb.GetRequest(keys=[key_of(1)] * 20))
            for _ in range(responses):
                next(call)
            wait_for(lambda: any(e.pins for e in tier.store.account.entries.values()))
            call.cancel()
            wait_for(lambda: tier.problems() == [])


def test_a_get_whose_caller_fails_leaves_nothing_held(tier, client):
    for number in range(3):
        client.put(blob_of(number))

    def land(offer):
        if offer.position == 1:
            raise ZeroDivisionError("a bug")
        return memoryview(bytearray(offer.num_bytes))

    for one in (client, TierClient(tier.address, shared=False, timeout_s=SAFETY_S)):
        with one, pytest.raises(ZeroDivisionError):
            one.get([key_of(number) for number in range(3)], land, MIB)
        wait_for(lambda: tier.problems() == [])


@pytest.mark.parametrize("shared", [True, False])
def test_a_buffer_of_another_size_is_refused_by_name(tier, shared):
    with TierClient(tier.address, shared=shared, timeout_s=SAFETY_S) as client:
        client.connect()
        client.put(blob_of(1))
        for size in (9_999, 10_001):
            with pytest.raises(UsageError, match="land: expected a buffer of 10000 bytes"):
                client.get([key_of(1)], lambda _, size=size: memoryview(bytearray(size)), MIB)
        wait_for(lambda: tier.problems() == [])


def test_calls_cut_off_by_closing_the_client_end_at_once(tier):
    with connected(tier, shared=False) as client:
        waiting, errors = threading.Event(), []

        def put():
            try:
                client._call(client._stub.Put, _stuck(waiting), client.deadline(10_000))
            except TierUnavailableError as error:
                errors.append(error)

        thread = threading.Thread(target=put)
        thread.start()
        wait_for(lambda: tier.server.service.namespaces._in_flight["default"] == 1)
        client.close()
        thread.join(SAFETY_S)
        assert not thread.is_alive()
        waiting.set()
        assert len(errors) == 1
        for call in (client.connect, client.stats, lambda: fetch(client, [key_of(1)])):
            with pytest.raises(TierUnavailableError):
                call()
        client.close()
    wait_for(lambda: tier.problems() == [])


def _stuck(waiting):
    yield pb.PutRequest(header=header_of(blob_of(1)))
    waiting.wait(SAFETY_S)

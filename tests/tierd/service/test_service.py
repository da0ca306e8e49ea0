"""The service and its client together: what was put is what is got, on both paths, and whose it is:
namespaces, their quotas, their share of transfers and their rates.

Only a certificate's own namespace is served to it, see test_tier_tls.py.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import grpc
import pytest
from live_tier import (
    LAYOUT,
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
from waiting import FakeClock, wait_for

from kvtier.errors import TierExhaustedError
from kvtier.tier.client import Blob, Landing
from kvtier.tier.wire import MAX_KEYS
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd import limits as limits_module
from kvtier_tierd.limits import PACED_CHUNK_BYTES, REFUSAL_S, Limits

CHUNK = 64 << 10
PAGE = 4096


@pytest.fixture(params=["shared", "stream"])
def client(tier, request):
    with connected(tier, shared=request.param == "shared") as client:
        assert client.shares_memory == (request.param == "shared")
        yield client


@pytest.mark.parametrize("num_bytes", [1, PAGE, CHUNK + 1, 3_000_001])
def test_blobs_of_any_size_come_back(num_bytes, memory_directory):
    with in_process(shared_directory=memory_directory, chunk_bytes=CHUNK) as tier:
        for number, shared in enumerate([True, False]):
            with connected(tier, shared=shared) as client:
                assert client.put(blob_of(number, num_bytes))
                assert fetch(client, [key_of(number)])[1] == {0: payload_of(number, num_bytes)}


def test_one_call_gets_many_blobs_and_says_what_became_of_each(client):
    for number in range(0, 40, 2):
        client.put(blob_of(number, 1000 * number + 1))
    wanted = [7, *range(40), 4, 4]

    def land(offer):
        assert offer[1:] == (1000 * wanted[offer.position] + 1, LAYOUT)
        if wanted[offer.position] == 8:
            return None
        return memoryview(buffers.setdefault(offer.position, bytearray(offer.num_bytes)))

    buffers: dict[int, bytearray] = {}
    outcome = client.get([key_of(number) for number in wanted], land, 1 << 20)
    for position, number in enumerate(wanted):
        fate = Landing.DECLINED if number == 8 else Landing.LANDED
        assert outcome[position] is (Landing.MISSING if number % 2 else fate)
        if outcome[position] is Landing.LANDED:
            assert buffers[position] == payload_of(number, 1000 * number + 1)


def test_an_empty_piece_is_a_piece_and_nothing_asked_for_is_nothing_got(client):
    payload = payload_of(1)
    client.put(Blob(key_of(1), LAYOUT, [b"", payload[:10], b"", payload[10:]]))
    assert fetch(client, [key_of(1)])[1] == {0: payload}
    assert client.get([], lambda offer: None, 0) == []
    assert client.exists([]) == (0, [])
    assert client.delete([]) == 0


def test_a_put_of_what_is_held_stores_nothing_and_replace_replaces(client, tier):
    assert client.put(blob_of(1))
    used = client.stats().used_bytes
    other = Blob(key_of(1), LAYOUT, [payload_of(2, 5000)])
    assert not client.put(blob_of(1, 3_000_000))
    assert not client.put(other)
    assert client.stats().used_bytes == used
    assert fetch(client, [key_of(1)])[1] == {0: payload_of(1)}
    assert client.put(other, replace=True)
    assert fetch(client, [key_of(1)])[1] == {0: payload_of(2, 5000)}
    assert client.stats().blobs == 1


def test_exists_says_what_is_there_and_how_far_a_chain_goes_and_what_is_deleted_is_not(client):
    for number in range(21):
        client.put(blob_of(number, 10))
    assert client.delete([key_of(number) for number in (*range(4, 40, 5), 9)]) == 4
    for numbers in ([], [4], [0, 1, 2], [20, 4, 3, 9], [0, *range(21), 40], [3, 3, 4]):
        presence = client.exists([key_of(number) for number in numbers])
        assert presence.present == [number < 21 and number % 5 != 4 for number in numbers]
        assert presence.leading_run == [*presence.present, False].index(False)


# ---- namespaces


def test_exists_answers_for_more_keys_than_one_call_may_have(client):
    client.put(blob_of(0))
    here, gone = key_of(0), key_of(7)
    for keys, run in (
        ([here] * (MAX_KEYS + 1) + [gone, here], MAX_KEYS + 1),
        ([here, gone] + [here] * MAX_KEYS, 1),
        ([], 0),
    ):
        found = client.exists(keys)
        assert found.leading_run == run
        assert found.present == [key == here for key in keys]


def test_namespaces_never_see_each_others_blobs(tier):
    with connected(tier, "ada") as ada, connected(tier, "bob") as bob:
        assert ada.put(blob_of(1))
        assert bob.exists([key_of(1)]).leading_run == 0
        assert fetch(bob, [key_of(1)])[0] == [Landing.MISSING]
        assert bob.delete([key_of(1)]) == 0
        assert bob.put(blob_of(1))
        assert bob.delete([key_of(1)]) == 1
        assert fetch(ada, [key_of(1)])[1] == {0: payload_of(1)}
        assert (ada.stats().namespace_bytes, bob.stats().namespace_bytes) == (3 * PAGE, 0)


def test_anothers_lease_cannot_be_used(stub, token):
    header = header_of(blob_of(1), "ada")
    request = pb.ReserveRequest(headers=[header], shared_token=token)
    leases = [stub.Reserve(request, metadata=whose("ada")).extents[0].lease]
    with failing(grpc.StatusCode.FAILED_PRECONDITION):
        stub.Commit(pb.CommitRequest(leases=leases), metadata=whose("bob"))
    stub.Release(pb.ReleaseRequest(leases=leases), metadata=whose("bob"))
    assert stub.Commit(pb.CommitRequest(leases=leases), metadata=whose("ada")).stored == 1


@pytest.mark.parametrize("shared", [True, False])
def test_a_quota_is_hard_and_evicts_only_its_own(memory_directory, shared):
    limits = {"ada": Limits(quota_bytes=10 * PAGE), "bob": Limits()}
    with (
        in_process(namespaces=limits, shared_directory=memory_directory) as tier,
        connected(tier, "ada", shared=shared) as ada,
        connected(tier, "bob", shared=shared) as bob,
    ):
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


@pytest.fixture
def waited(monkeypatch) -> list[float]:
    """Record how long, in seconds, namespaces kept their clients waiting; no time passes
    otherwise."""
    clock, found = FakeClock(), []

    async def sleep(seconds: float) -> None:
        found.append(seconds)
        clock.passes(seconds)

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
        wait_for(lambda: tier.transfers() == 2)
        waited.clear()
        with failing(grpc.StatusCode.RESOURCE_EXHAUSTED):
            list(stub.Get(pb.GetRequest(keys=[key_of(1)])))
        # Refusals are slow, so that asking again and again is of no use to a client.
        assert waited == [REFUSAL_S]
        with failing(grpc.StatusCode.RESOURCE_EXHAUSTED):
            stub.Put(iter([pb.PutRequest(header=header_of(blob_of(3)))]))
        with connected(tier, "another") as other:
            assert other.put(blob_of(4))
        go_on_first.set(), go_on_second.set()
        assert first.result().stored
        assert second.result().stored
        wait_for(lambda: tier.transfers() == 0)


def test_streams_of_a_namespace_keep_to_its_rate_and_others_do_not_wait(waited):
    """It is not cut off for that, though the pauses are longer than a stream may stall."""
    rate, size = 1 << 12, 512 << 10
    limits = {"ada": Limits(bytes_per_s=rate), "bob": Limits()}
    with (
        in_process(namespaces=limits, stall_s=60.0) as tier,
        connected(tier, "ada", shared=False) as ada,
        connected(tier, "bob", shared=False) as bob,
    ):
        assert ada.connect().chunk_bytes == PACED_CHUNK_BYTES < bob.connect().chunk_bytes
        assert ada.put(blob_of(1, size))
        assert fetch(ada, [key_of(1)])[1] == {0: payload_of(1, size)}
        # The first chunk does not wait, and what the last one has to wait is the next one's.
        assert sum(waited) >= (2 * size - 2 * PACED_CHUNK_BYTES) / rate > 3 * 60.0
        waited.clear()
        assert bob.put(blob_of(1, size))
        assert waited == []

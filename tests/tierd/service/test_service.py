"""The service and its client together: what was put is what is got, and only by whom it should."""

from __future__ import annotations

import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st
from live_tier import (
    LAYOUT,
    blob_of,
    eventually,
    failing,
    fetch,
    header_of,
    in_process,
    key_of,
    payload_of,
    raw_stub,
)

from kvtier.errors import TierExhaustedError, TierRefusedError, TierUnavailableError
from kvtier.tier.blobs.payload import DTYPE_BYTES, SpanLayout
from kvtier.tier.client import Blob, Landing, TierClient
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.limits.namespaces import PACED_CHUNK_BYTES, REFUSAL_S, Limits
from kvtier_tierd.server import SERVICE_NAME

CHUNK = 64 << 10
PAGE = 4096


@pytest.fixture(params=["shared", "stream"])
def client(tier, request):
    with TierClient(tier.address, timeout_s=10.0, shared=request.param == "shared") as client:
        client.connect()
        assert client.shares_memory == (request.param == "shared")
        yield client


# ---- bytes


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_tensors_come_back_bit_by_bit(client, dtype):
    span = SpanLayout(dtype, num_layers=3, num_tokens=33, num_kv_heads=2, head_dim=32)
    bits = torch.randint(0, 256, (span.num_bytes,), dtype=torch.uint8)
    stored = bits.view(getattr(torch, dtype)).view(span.shape)
    key, value = (side.contiguous() for side in stored.chunk(2, dim=1))
    pieces = [memoryview(side.view(torch.uint8).numpy()) for side in (key, value)]
    assert client.put(Blob(key_of(1), span.encode(), pieces))

    landed = torch.zeros_like(stored)

    def land(offer):
        assert offer == (0, span.num_bytes, span.encode())
        return memoryview(landed.view(torch.uint8).numpy())

    assert client.get([key_of(1)], land, span.num_bytes) == [Landing.LANDED]
    wanted = torch.cat([key.flatten(), value.flatten()])
    assert torch.equal(landed.flatten().view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("num_bytes", [1, PAGE - 1, PAGE, CHUNK, CHUNK + 1, 3_000_001])
def test_blobs_of_any_size_come_back(num_bytes, memory_directory):
    with in_process(shared_directory=memory_directory, chunk_bytes=CHUNK) as tier:
        for number, shared in enumerate([True, False]):
            with TierClient(tier.address, timeout_s=10.0, shared=shared) as client:
                client.connect()
                assert client.put(blob_of(number, num_bytes))
                outcome, landed = fetch(client, [key_of(number)])
                assert outcome == [Landing.LANDED]
                assert landed[0] == payload_of(number, num_bytes)
        assert tier.problems() == []


def test_one_call_gets_many_blobs_and_says_what_became_of_each(client):
    for number in range(0, 40, 2):
        client.put(blob_of(number, 1000 * number + 1))
    wanted = [7, *range(40), 4, 4]

    def land(offer):
        if wanted[offer.position] == 8:
            return None
        return memoryview(buffers.setdefault(offer.position, bytearray(offer.num_bytes)))

    buffers: dict[int, bytearray] = {}
    outcome = client.get([key_of(number) for number in wanted], land, 1 << 20)
    for position, number in enumerate(wanted):
        if number == 8:
            assert outcome[position] is Landing.DECLINED
        elif number % 2:
            assert outcome[position] is Landing.MISSING
        else:
            assert outcome[position] is Landing.LANDED
            assert buffers[position] == payload_of(number, 1000 * number + 1)


def test_an_empty_piece_is_a_piece(client):
    payload = payload_of(1)
    client.put(Blob(key_of(1), LAYOUT, [b"", payload[:10], b"", payload[10:]]))
    assert fetch(client, [key_of(1)])[1] == {0: payload}


def test_nothing_asked_for_is_nothing_got(client):
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


def test_what_is_deleted_is_gone(client):
    for number in range(3):
        client.put(blob_of(number))
    assert client.delete([key_of(0), key_of(2), key_of(9)]) == 2
    assert client.exists([key_of(number) for number in range(3)]).present == [False, True, False]


@settings(max_examples=50)
@given(st.data())
def test_exists_says_what_is_there_and_how_far_a_chain_goes(exists_client, data):
    numbers = data.draw(st.lists(st.integers(0, 20), max_size=30))
    presence = exists_client.exists([key_of(number) for number in numbers])
    assert presence.present == [number % 3 != 0 for number in numbers]
    gaps = [i for i, number in enumerate(numbers) if number % 3 == 0]
    assert presence.leading_run == (gaps[0] if gaps else len(numbers))


@pytest.fixture(scope="module")
def exists_client():
    with in_process() as tier, TierClient(tier.address, timeout_s=10.0) as client:
        client.connect()
        for number in range(21):
            if number % 3:
                client.put(blob_of(number, 10))
        yield client


# ---- whose they are


def test_namespaces_never_see_each_others_blobs(tier):
    ada = TierClient(tier.address, "ada")
    bob = TierClient(tier.address, "bob")
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
            with TierClient(tier.address, name) as client, pytest.raises(TierRefusedError):
                client.connect()
        with TierClient(tier.address, "ada") as client:
            assert client.connect().namespace == "ada"


@pytest.mark.parametrize("name", ["", "x" * 201])
def test_a_namespace_that_cannot_be_is_refused(tier, name):
    with raw_stub(tier.address) as stub, failing(grpc.StatusCode.PERMISSION_DENIED):
        stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=[("kvtier-namespace", name)])


@pytest.mark.parametrize("shared", [True, False])
def test_a_quota_is_hard_and_evicts_only_its_own(memory_directory, shared):
    limits = {"ada": Limits(quota_bytes=10 * PAGE), "bob": Limits()}
    with in_process(namespaces=limits, shared_directory=memory_directory) as tier:
        ada = TierClient(tier.address, "ada", shared=shared)
        bob = TierClient(tier.address, "bob", shared=shared)
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


def test_transfers_beyond_the_in_flight_limit_are_refused_and_others_are_not():
    with in_process(in_flight=2) as tier, raw_stub(tier.address) as stub:
        waiting = threading.Event()

        def half(number):
            yield pb.PutRequest(header=header_of(blob_of(number)))
            waiting.wait(20)
            yield pb.PutRequest(chunk=payload_of(number))

        calls = [stub.Put.future(half(number)) for number in range(2)]
        in_flight = tier.server.service.namespaces._in_flight
        eventually(lambda: in_flight["default"] == 2)
        asked_at = time.monotonic()
        with failing(grpc.StatusCode.RESOURCE_EXHAUSTED):
            list(stub.Get(pb.GetRequest(keys=[key_of(1)])))
        # Refusals are slow, so that asking again and again is of no use to a client.
        assert time.monotonic() - asked_at >= REFUSAL_S
        with failing(grpc.StatusCode.RESOURCE_EXHAUSTED):
            stub.Put(iter([pb.PutRequest(header=header_of(blob_of(3)))]))
        with TierClient(tier.address, "another") as other:
            assert other.put(blob_of(4))
        waiting.set()
        assert all(call.result().stored for call in calls)
        eventually(lambda: in_flight["default"] == 0)


def test_streams_of_a_namespace_keep_to_its_rate_and_others_do_not_wait():
    rate, size = 1 << 20, 512 << 10
    limits = {"ada": Limits(bytes_per_s=rate), "bob": Limits()}
    with in_process(namespaces=limits) as tier, ExitStack() as stack:
        ada, bob = (
            stack.enter_context(TierClient(tier.address, name, timeout_s=20.0, shared=False))
            for name in limits
        )
        assert ada.connect().chunk_bytes == PACED_CHUNK_BYTES < bob.connect().chunk_bytes
        asked_at = time.monotonic()
        assert ada.put(blob_of(1, size))
        _, landed = fetch(ada, [key_of(1)])
        # The first chunk does not wait, and what the last one has to wait is the next one's.
        assert time.monotonic() - asked_at >= (2 * size - 2 * PACED_CHUNK_BYTES) / rate
        assert landed == {0: payload_of(1, size)}
        asked_at = time.monotonic()
        assert bob.put(blob_of(1, size))
        assert time.monotonic() - asked_at < size / rate / 2


# ---- how it is run


def test_a_draining_service_ends_what_runs_and_takes_no_more():
    with in_process(drain_s=20.0) as tier, raw_stub(tier.address) as stub, ExitStack() as stack:
        waiting = threading.Event()

        def half():
            yield pb.PutRequest(header=header_of(blob_of(1)))
            waiting.wait(20)
            yield pb.PutRequest(chunk=payload_of(1))

        running = stub.Put.future(half())
        eventually(lambda: tier.server.service.namespaces._in_flight["default"] == 1)
        watched = stack.enter_context(watching(tier.address))
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING

        stopping = threading.Thread(target=tier.shut_down)
        stopping.start()
        assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with failing(grpc.StatusCode.UNAVAILABLE):
            stub.Exists(pb.ExistsRequest(keys=[key_of(1)]))
        with TierClient(tier.address) as client, pytest.raises(TierUnavailableError):
            client.connect()
        began = time.monotonic()
        waiting.set()
        assert running.result().stored
        stopping.join(20)
        assert time.monotonic() - began < 5.0, "the end does not wait for a watcher"


@contextmanager
def watching(address):
    with grpc.insecure_channel(address) as channel:
        yield health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        )


def test_a_call_that_does_not_end_is_cut_off_when_draining_is_over(memory_directory):
    serving = in_process(drain_s=0.1, shared_directory=memory_directory)
    with serving as tier, raw_stub(tier.address) as stub:
        waiting = threading.Event()

        def half():
            yield pb.PutRequest(header=header_of(blob_of(1)))
            waiting.wait(20)

        running = stub.Put.future(half())
        eventually(lambda: tier.server.service.namespaces._in_flight["default"] == 1)
        tier.shut_down()
        assert running.exception() is not None
        waiting.set()
        assert tier.store.account.reserved.total() == 0


def test_stats_and_metrics_say_what_happened(memory_directory):
    with in_process(shared_directory=memory_directory, metrics_port=0) as tier:
        streaming = TierClient(tier.address, "ada", shared=False)
        sharing = TierClient(tier.address, "ada")
        with streaming, sharing:
            streaming.connect(), sharing.connect()
            streaming.put(blob_of(1, 1000))
            sharing.put(blob_of(2, 5000))
            sharing.put(blob_of(2, 5000))
            for one in (streaming, sharing):
                fetch(one, [key_of(1), key_of(2), key_of(3)])
            streaming.exists([key_of(1), key_of(9)])
            with pytest.raises(TierExhaustedError):
                streaming.put(blob_of(4, 17 << 20))
            stats = streaming.stats()
        assert (stats.store, stats.blobs, stats.used_bytes) == ("memory", 2, 3 * PAGE)
        assert stats.capacity_bytes == stats.namespace_quota_bytes == 16 << 20
        url = f"http://127.0.0.1:{tier.server.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            said = answer.read().decode()
        for line in (
            'bytes_total{direction="put",namespace="ada",path="stream"} 1000.0',
            'bytes_total{direction="put",namespace="ada",path="shared"} 5000.0',
            'bytes_total{direction="get",namespace="ada",path="stream"} 6000.0',
            'bytes_total{direction="get",namespace="ada",path="shared"} 6000.0',
            'blobs_moved_total{direction="get",namespace="ada",path="shared"} 2.0',
            'misses_total{namespace="ada"} 2.0',
            'lookups_total{held="yes",namespace="ada"} 1.0',
            'lookups_total{held="no",namespace="ada"} 1.0',
            'errors_total{code="RESOURCE_EXHAUSTED",method="Put"} 1.0',
            "used_bytes 12288.0",
            "capacity_bytes 1.6777216e+07",
            "blobs 2.0",
            "leases 0.0",
            "evictions_total 0.0",
            "leases_expired_total 0.0",
        ):
            assert f"\nkvtier_tier_{line}\n" in said, line


def test_the_store_is_asked_for_metrics_in_its_own_thread_only(monkeypatch):
    with in_process(metrics_port=0) as tier:
        asked, stats = [], tier.store.stats
        monkeypatch.setattr(
            tier.store, "stats", lambda: asked.append(threading.current_thread()) or stats()
        )
        url = f"http://127.0.0.1:{tier.server.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert b"kvtier_tier_used_bytes 0.0" in answer.read()
        assert asked == [tier.thread]


def test_health_and_reflection_answer(tier):
    with grpc.insecure_channel(tier.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE_NAME):
            status = health.Check(health_pb2.HealthCheckRequest(service=name)).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        with failing(grpc.StatusCode.NOT_FOUND):
            health.Check(health_pb2.HealthCheckRequest(service="another"))
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = reflection.ServerReflectionInfo(iter([request]))
        names = {service.name for service in answer.list_services_response.service}
        assert {"kvtier.v1.TierService", "grpc.health.v1.Health"} <= names


def test_a_unix_socket_serves_as_well(tmp_path):
    listen = f"unix:{tmp_path}/t"
    with in_process(listen=listen) as tier, TierClient(tier.address) as client:
        client.connect()
        assert client.put(blob_of(1))
        assert fetch(client, [key_of(1)])[1] == {0: payload_of(1)}

"""The run of the service: what it says of itself and its calls, whom they keep waiting; its end."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from live_tier import (
    LAYOUT,
    ask,
    blob_of,
    connected,
    failing,
    fetch,
    in_process,
    key_of,
    raw_stub,
    stalled_put,
)
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from otlp_collector import collecting
from waiting import SAFETY_S, wait_for

from kvtier.errors import TierExhaustedError, TierProtocolError, TierUnavailableError, UsageError
from kvtier.tier.client import TierClient
from kvtier.tier.transport.tracing import TracingInterceptor
from kvtier.tier.wire import MAX_KEYS
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.monitoring.tracing import OtlpTraces
from kvtier_tierd.server import SERVICE_NAME
from kvtier_tierd.service.requests import MAX_HELD_KEYS
from kvtier_tierd.stores.base import BlobInfo, BlobName

PAGE = 4096


def test_a_draining_service_ends_what_runs_and_takes_no_more():
    with (
        in_process(drain_s=3600.0, metrics_port=0) as tier,
        raw_stub(tier.address) as stub,
        stalled_put(stub, 1) as (running, go_on),
        watching(tier.address) as watched,
    ):
        wait_for(lambda: tier.transfers() == 1)
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING

        stopping = threading.Thread(target=tier.shut_down)
        stopping.start()
        assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (ask(tier, "/readyz"), ask(tier, "/livez")) == ((503, "not ready\n"), (200, "ok\n"))
        with failing(grpc.StatusCode.UNAVAILABLE):
            stub.Exists(pb.ExistsRequest(keys=[key_of(1)]))
        with (
            TierClient(tier.address, timeout_s=SAFETY_S) as client,
            pytest.raises(TierUnavailableError),
        ):
            client.connect()
        go_on.set()
        assert running.result().stored
        stopping.join(SAFETY_S)
        assert not stopping.is_alive(), "the end does not wait for a watcher"


@contextmanager
def watching(address):
    with grpc.insecure_channel(address) as channel:
        yield health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        )


def test_a_call_that_does_not_end_is_cut_off_when_draining_is_over():
    with (
        in_process(drain_s=0.1) as tier,
        raw_stub(tier.address) as stub,
        stalled_put(stub, 1) as (running, _),
    ):
        wait_for(lambda: tier.transfers() == 1)
        tier.shut_down()
        assert running.exception() is not None
        assert tier.store.account.reserved.total() == 0


def test_stats_and_metrics_say_what_happened(memory_directory, monkeypatch):
    with (
        in_process(shared_directory=memory_directory, metrics_port=0) as tier,
        connected(tier, "ada", shared=False) as streaming,
        connected(tier, "ada") as sharing,
    ):
        streaming.put(blob_of(1, 1000))
        sharing.put(blob_of(2, 5000))
        sharing.put(blob_of(2, 5000))
        for one in (streaming, sharing):
            fetch(one, [key_of(1), key_of(2), key_of(3)])
        streaming.exists([key_of(1), key_of(9)])
        with pytest.raises(TierProtocolError):
            streaming.exists([b"short"])
        with pytest.raises(TierExhaustedError):
            streaming.put(blob_of(4, 17 << 20))
        stats = streaming.stats()
        assert (stats.store, stats.blobs, stats.used_bytes) == ("memory", 2, 3 * PAGE)
        assert stats.capacity_bytes == stats.namespace_quota_bytes == 16 << 20
        # A client has its answer before the call is counted.
        wait_for(lambda: "kvtier_tier_leases 0.0\n" in ask(tier, "/metrics")[1])
        counted = 'kvtier_tier_call_seconds_count{method="Put"} 2.0\n'
        wait_for(lambda: counted in ask(tier, "/metrics")[1])
        asked, real = [], tier.store.stats
        monkeypatch.setattr(
            tier.store, "stats", lambda: asked.append(threading.current_thread()) or real()
        )
        _, said = ask(tier, "/metrics")
        assert asked == [tier.thread], "the store belongs to its event loop"
        for line in (
            'bytes_total{direction="put",namespace="ada",path="stream"} 1000.0',
            'bytes_total{direction="put",namespace="ada",path="shared"} 5000.0',
            'bytes_total{direction="get",namespace="ada",path="stream"} 6000.0',
            'bytes_total{direction="get",namespace="ada",path="shared"} 6000.0',
            'blobs_moved_total{direction="get",namespace="ada",path="shared"} 2.0',
            'misses_total{namespace="ada"} 2.0',
            'lookups_total{held="yes",namespace="ada"} 1.0',
            'lookups_total{held="no",namespace="ada"} 1.0',
            # A counter that begins at 1 has not grown for Prometheus.
            'quarantined_total{namespace="ada"} 0.0',
            'errors_total{code="RESOURCE_EXHAUSTED",method="Put"} 1.0',
            # Calls are timed however they end.
            'call_seconds_count{method="Exists"} 2.0',
            'call_seconds_count{method="Put"} 2.0',
            "used_bytes 12288.0",
            "capacity_bytes 1.6777216e+07",
            "blobs 2.0",
            "leases 0.0",
            "evictions_total 0.0",
            "shed_total 0.0",
            "leases_expired_total 0.0",
        ):
            assert f"\nkvtier_tier_{line}\n" in said, line


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


def test_no_call_about_many_keys_keeps_the_others_waiting(tier, stub, token, monkeypatch):
    """The store is asked about some of them only between two turns of the event loop."""
    store = tier.store
    most, since = Counter[str](), Counter[str]()

    def count(owner: Any, what: str, keys: Callable[[Any], int] = lambda _: 1) -> None:
        real = getattr(owner, what)

        def counting(about: Any) -> Any:
            since[what] += keys(about)
            most[what] = max(most[what], since[what])
            return real(about)

        monkeypatch.setattr(owner, what, counting)

    async def watch() -> None:
        while True:
            await asyncio.sleep(0)
            since.clear()

    async def fill() -> None:
        for number in range(2000):
            info = BlobInfo(10, LAYOUT, bytes(16))
            await store.commit(await store.reserve(BlobName("default", key_of(number)), info))

    tier.run(fill())
    count(store, "exists", len)
    for owner, what in ((store, "open"), (store, "delete"), (tier.server.service.leases, "_drop")):
        count(owner, what)
    many = [key_of(number) for number in range(MAX_KEYS)]
    held = many[:MAX_HELD_KEYS]
    watching = tier.call(lambda: asyncio.ensure_future(watch()))
    stub.Exists(pb.ExistsRequest(keys=many))
    request = pb.AcquireRequest(keys=held, shared_token=token, lease_ms=60_000)
    leases = [extent.lease for extent in stub.Acquire(request).extents]
    assert len(leases) == 2000
    stub.Release(pb.ReleaseRequest(leases=leases))
    assert stub.Delete(pb.DeleteRequest(keys=held)).deleted == 2000
    tier.call(watching.cancel)
    # So many keys take some milliseconds.
    assert most == {"exists": 2048, "open": 64, "_drop": 64, "delete": 256}


# ---- traces

CLIENT, SERVER = trace.SpanKind.CLIENT, 2


def ids(span) -> tuple[bytes, bytes]:
    context = span.get_span_context()
    return context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big")


def test_every_call_in_a_span_is_a_span_of_client_and_service_in_one_trace():
    """A call that fails is a span that failed on both sides; one outside of any span has none."""
    made, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(made))
    tracer = provider.get_tracer("test")
    interceptors = [TracingInterceptor(tracer)]
    with collecting() as collector:
        with (
            in_process(otlp_traces_endpoint=collector.address) as tier,
            connected(tier, shared=False, interceptors=interceptors) as client,
            connected(tier) as untraced,
        ):
            assert client.put(blob_of(0))
            with tracer.start_as_current_span("all") as root:
                untraced.connect()
                client.connect()
                assert client.put(blob_of(1))
                assert client.delete([key_of(2)]) == 0
                fetch(client, [key_of(1), key_of(2)])
                with pytest.raises(TierProtocolError, match="invalid_argument"):
                    client.exists([b"short"])
            wait_for(lambda: len(made.get_finished_spans()) == 6)
        services = collector.wait_for(lambda spans: len(spans) == 5)
    clients = {span.name: span for span in made.get_finished_spans() if span.kind is CLIENT}
    codes = {
        name.rpartition("/")[2]: span.attributes["rpc.grpc.status_code"]
        for name, span in clients.items()
    }
    assert codes == {"GetServerInfo": 0, "Put": 0, "Delete": 0, "Get": 0, "Exists": 3}
    for span in services:
        ours = clients[span.name]
        assert (span.service, span.kind) == ("kvtier-tier", SERVER)
        assert (span.trace_id, span.parent_id) == ids(ours)
        assert span.trace_id == ids(root)[0]
        assert ours.parent.span_id == root.get_span_context().span_id
        assert span.failed == (not ours.status.is_ok) == span.name.endswith("Exists")


def test_without_an_endpoint_nothing_is_traced_and_no_library_is_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with in_process() as tier, connected(tier) as client:
        assert tier.server.traces is None
        assert client.put(blob_of(1))
    with pytest.raises(UsageError, match=r"^--otlp-traces-endpoint: expected .*tracing"):
        OtlpTraces("localhost:4317")


def test_a_collector_that_is_away_costs_no_call():
    with in_process(otlp_traces_endpoint="127.0.0.1:9") as tier, connected(tier) as client:
        assert client.put(blob_of(1))

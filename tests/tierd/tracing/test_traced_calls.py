"""Calls of a traced client are spans, and what the service does about them is in the same trace."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from live_tier import blob_of, connected, fetch, in_process, key_of
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from otlp_collector import Collector, collecting
from waiting import SAFETY_S, wait_for

from kvtier.errors import TierProtocolError, UsageError
from kvtier.tier.client import TierClient
from kvtier.tier.transport.tracing import TracingInterceptor
from kvtier_tierd.monitoring.tracing import NoTraces, open_traces
from kvtier_tierd.stores.memory import MemoryOptions

CLIENT, SERVER = trace.SpanKind.CLIENT, 2


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture
def ours() -> tuple[trace.Tracer, InMemorySpanExporter]:
    """A tracer, and what it has made."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("test"), exporter


def tier_of(collector: Collector, **options):
    return in_process(
        store=MemoryOptions(1 << 24), otlp_traces_endpoint=collector.address, **options
    )


def ids(span) -> tuple[bytes, bytes]:
    context = span.get_span_context()
    return context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big")


def test_every_call_in_a_span_is_a_span_of_client_and_service_in_one_trace(collector, ours):
    tracer, made = ours
    interceptors = [TracingInterceptor(tracer)]
    with tier_of(collector) as tier:
        client = TierClient(
            tier.address, timeout_s=SAFETY_S, shared=False, interceptors=interceptors
        )
        with client, tracer.start_as_current_span("all") as root:
            client.connect()
            assert client.put(blob_of(1))
            assert client.exists([key_of(1), key_of(2)]).present == [True, False]
            fetch(client, [key_of(1), key_of(2)])
        wait_for(lambda: len(made.get_finished_spans()) == 5)
    clients = {s.name: s for s in made.get_finished_spans() if s.kind is CLIENT}
    services = collector.wait_for(lambda spans: len(spans) == 4)
    assert {name.rpartition("/")[2] for name in clients} == {
        *("GetServerInfo", "Put", "Exists", "Get")
    }
    for span in services:
        assert span.service == "kvtier-tier"
        assert span.kind == SERVER
        assert not span.failed
        assert (span.trace_id, span.parent_id) == ids(clients[span.name])
        assert span.trace_id == ids(root)[0]
    assert all(one.parent.span_id == root.get_span_context().span_id for one in clients.values())
    assert all(one.attributes["rpc.grpc.status_code"] == 0 for one in clients.values())


def test_a_call_outside_of_any_span_has_none_and_goes_as_well(collector, ours):
    tracer, made = ours
    with tier_of(collector) as tier:
        interceptors = [TracingInterceptor(tracer)]
        with connected(tier, interceptors=interceptors) as client:
            assert client.put(blob_of(1))
        with (
            TierClient(tier.address, timeout_s=SAFETY_S) as untraced,
            tracer.start_as_current_span("a"),
        ):
            untraced.connect()
    assert [span.name for span in made.get_finished_spans()] == ["a"]
    assert collector.spans == []


def test_a_call_that_fails_is_a_span_that_failed_on_both_sides(collector, ours):
    tracer, made = ours
    with tier_of(collector) as tier:
        interceptors = [TracingInterceptor(tracer)]
        with connected(tier, interceptors=interceptors) as client:
            with (
                tracer.start_as_current_span("all"),
                pytest.raises(TierProtocolError, match="invalid_argument"),
            ):
                client.exists([b"short"])
            wait_for(lambda: len(made.get_finished_spans()) == 2)
    (span,) = (one for one in made.get_finished_spans() if one.kind is CLIENT)
    assert span.attributes["rpc.grpc.status_code"] == 3
    assert not span.status.is_ok
    (service,) = collector.wait_for(lambda spans: len(spans) == 1)
    assert service.failed


def test_without_an_endpoint_nothing_is_traced_and_no_library_is_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert isinstance(open_traces(None), NoTraces)
    with pytest.raises(UsageError, match=r"^--otlp-traces-endpoint: expected .*tracing"):
        open_traces("localhost:4317")


def test_a_collector_that_is_away_costs_no_call():
    with in_process(otlp_traces_endpoint="127.0.0.1:9") as tier, connected(tier) as client:
        assert client.put(blob_of(1))

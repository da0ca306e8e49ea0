"""An OpenTelemetry collector in a test's own process: what was exported to it, span by span."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from waiting import wait_for


@dataclass(frozen=True)
class Span:
    """service: who made it; parent_id: empty for a root."""

    service: str
    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    kind: int
    failed: bool
    attributes: dict[str, Any] = field(hash=False)

    @property
    def method(self) -> str:
        """The last part of the name."""
        return self.name.rpartition("/")[2]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """spans: in the order in which they came. address: host:port, without TLS."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802  # gRPC's name
        for resource in request.resource_spans:
            named = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [_span(named["service.name"], one) for one in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, fact: Callable[[Sequence[Span]], bool]) -> list[Span]:
        """All spans, once this is true of them."""
        wait_for(
            lambda: fact(list(self.spans)),
            lambda: f"not so: {sorted({(span.service, span.name) for span in self.spans})}",
        )
        return list(self.spans)

    def stop(self) -> None:
        self._server.stop(0).wait()


def _span(service: str, span: Any) -> Span:
    attributes = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
    return Span(
        service,
        span.name,
        span.trace_id,
        span.span_id,
        span.parent_span_id,
        span.kind,
        span.status.code == 2,
        attributes,
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    try:
        yield collector
    finally:
        collector.stop()

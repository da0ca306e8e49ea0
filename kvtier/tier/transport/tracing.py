"""Spans of calls to the tier, for clients that trace (OpenTelemetry, the extra `tracing`).

A call that is made inside a span becomes a child of it, and says so to the service in the metadata
`traceparent` (W3C Trace Context), so that what the service does about it is in the same trace. A
call that is made outside of any span is left as it is.

A stream's span ends with the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator


class TracingInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
):
    """See the module docstring. Thread-safe."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    def _intercept(
        self, continuation: Callable[[Any, Any], Any], details: Any, request: Any
    ) -> Any:
        if not trace.get_current_span().get_span_context().is_valid:
            return continuation(details, request)
        service, _, method = details.method.lstrip("/").partition("/")
        span = self._tracer.start_span(
            f"{service}/{method}",
            kind=trace.SpanKind.CLIENT,
            attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": method},
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, trace.set_span_in_context(span))
        # gRPC takes the rest from the details that it gave.
        traced = SimpleNamespace(metadata=(*(details.metadata or ()), *carrier.items()))
        try:
            call = continuation(traced, request)
        except BaseException as error:
            span.record_exception(error)
            span.end()
            raise
        call.add_done_callback(lambda done: _end(span, done))
        return call

    intercept_unary_unary = _intercept  # type: ignore[assignment]
    intercept_unary_stream = _intercept  # type: ignore[assignment]
    intercept_stream_unary = _intercept  # type: ignore[assignment]


def _end(span: trace.Span, call: Any) -> None:
    """The call is over, however."""
    code = call.code()
    span.set_attribute("rpc.grpc.status_code", code.value[0])
    if code is not grpc.StatusCode.OK:
        span.set_status(trace.StatusCode.ERROR, code.name)
    span.end()

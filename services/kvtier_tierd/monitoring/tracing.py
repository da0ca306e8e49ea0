"""Spans of the service's calls, where `--otlp-traces-endpoint` says to whom they go.

A call whose client traces it (metadata `traceparent`, W3C Trace Context) becomes a span in its
client's trace. Calls that nobody traces have none: whether to trace is the engine's to say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from kvtier.errors import UsageError

SERVICE_NAME = "kvtier-tier"
CLOSE_MS = 2_000


class Traces(Protocol):
    """The traces of calls, whichever library makes them."""

    def serving(self, method: str, context: Any) -> AbstractContextManager[None]:
        """Return a context manager around a call; an error raised in it is that of the call's span.
        context: gRPC's, of the call."""

    def close(self) -> None:
        """Send what is left. Blocks, CLOSE_MS at the most for each of two steps."""


class NoTraces:
    """Traces of a service without an endpoint: no spans, and no library of them."""

    def serving(self, method: str, context: Any) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None:
        pass


class OtlpTraces:
    """Spans that go to a collector over OTLP (gRPC), in a thread of the exporter's.

    endpoint: http://host:port without TLS, https://host:port with it; without a scheme, without.
    Raises UsageError where the extra `tracing` is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
        except ImportError as error:
            expected = "kvtier's extra `tracing` to be installed beside it"
            raise UsageError("--otlp-traces-endpoint", expected, str(error)) from error
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        exporter = OTLPSpanExporter(endpoint, insecure=not endpoint.startswith("https://"))
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": SERVICE_NAME}),
            sampler=ParentBased(ALWAYS_OFF),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvtier_tierd")
        self._propagator = TraceContextTextMapPropagator()

    def serving(self, method: str, context: Any) -> AbstractContextManager[None]:
        metadata = context.invocation_metadata() or ()
        return self._span(method, {k: v for k, v in metadata if isinstance(v, str)})

    @contextmanager
    def _span(self, method: str, carrier: dict[str, str]) -> Iterator[None]:
        from opentelemetry import trace

        # The span is not made the current one: a handler may end in another context than it began
        # in, and makes no spans of its own.
        span = self._tracer.start_span(
            f"kvtier.v1.TierService/{method}",
            context=self._propagator.extract(carrier),
            kind=trace.SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.method": method},
        )
        with span:
            yield

    def close(self) -> None:
        self._provider.force_flush(CLOSE_MS)
        self._provider.shutdown()


def open_traces(endpoint: str | None) -> Traces:
    """Open the traces that `--otlp-traces-endpoint` names; None: they go nowhere."""
    return NoTraces() if endpoint is None else OtlpTraces(endpoint)


__all__ = ["NoTraces", "OtlpTraces", "Traces", "open_traces"]

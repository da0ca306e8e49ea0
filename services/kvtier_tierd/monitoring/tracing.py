"""Spans of the service's calls, where `--otlp-traces-endpoint` says to whom they go.

A call whose client traces it (metadata `traceparent`, W3C Trace Context) becomes a span in its
client's trace. Calls that nobody traces have none: whether to trace is the engine's to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvtier.errors import UsageError

SERVICE_NAME = "kvtier-tier"
CLOSE_MS = 2_000


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

    @contextmanager
    def serving(self, method: str, context: Any) -> Iterator[None]:
        """Around a call; an error raised in it is that of the call's span. context: gRPC's."""
        from opentelemetry import trace

        metadata = context.invocation_metadata() or ()
        carrier = {name: value for name, value in metadata if isinstance(value, str)}
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
        """Send what is left. Blocks, CLOSE_MS at the most for each of two steps."""
        self._provider.force_flush(CLOSE_MS)
        self._provider.shutdown()

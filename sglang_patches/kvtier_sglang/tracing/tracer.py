"""SGLang's tracer, where it traces, and the span that one of its requests is in."""

from __future__ import annotations

from typing import Any


def engine_tracer() -> Any:
    """An OpenTelemetry tracer whose spans go where SGLang's go; None where SGLang does not trace in
    this process, as without `--enable-trace`."""
    from sglang.srt.observability.trace import get_global_tracing_enabled

    if not get_global_tracing_enabled():
        return None
    from opentelemetry import trace

    return trace.get_tracer("kvtier")


def interceptors() -> tuple[Any, ...]:
    """Return what a tier client's calls go through: its tracing, where SGLang traces."""
    tracer = engine_tracer()
    if tracer is None:
        return ()
    from kvtier.tier.transport.tracing import TracingInterceptor

    return (TracingInterceptor(tracer),)


def context_of(req: Any) -> Any:
    """The OpenTelemetry context that a request's spans belong to: the scheduler's part of it, or
    all of it; None for one that is not traced."""
    of_request = getattr(getattr(req, "time_stats", None), "trace_ctx", None)
    if of_request is None or not of_request.tracing_enable:
        return None
    from opentelemetry import trace

    thread = getattr(of_request, "thread_context", None)
    span = getattr(thread, "thread_span", None)
    if span is not None:
        return trace.set_span_in_context(span)
    return getattr(of_request, "root_span_context", None)

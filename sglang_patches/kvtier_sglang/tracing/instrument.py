"""A cache and its parts, wrapped so that their work for a traced request becomes spans.

Wrapping replaces methods of these objects alone. What a wrapped method asks of the tier in the
background runs in a copy of its context (kvtier.tier.link), and so is below its span.

Scheduler thread only, but for the work of fetches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace

from kvtier_sglang.tracing.tracer import context_of

Around = Callable[..., Any]
Attributes = Mapping[str, int | float | str | bool]


def instrument(cache: Any, tracer: trace.Tracer) -> None:
    """Wrap a KvtierRadixCache that was just made. tracer: see engine_tracer."""
    spans = RequestSpans(cache, tracer)
    wrap(cache, "match_prefix", spans.match)
    wrap(cache, "prefetch_from_storage", spans.ask)
    wrap(cache, "init_load_back", spans.restore)
    wrap(cache, "checkpoint", spans.within)
    wrap(cache, "on_release", spans.within)
    wrap(cache.compressor, "end_turn", spans.select)
    if cache.tier is not None:
        wrap(cache.tier, "published", spans.spill)
        wrap(cache.tier.spiller, "compressed", spans.spill_record)
        wrap(cache.tier.link, "submit", spans.submit)
    if cache.refresh is not None:
        wrap(cache.refresh.refresher, "begin_pass", spans.begin_pass)
        wrap(cache.refresh.refresher, "end_pass", spans.end_pass)


def wrap(owner: Any, name: str, around: Around) -> None:
    """Have `around(method, ...)` called instead of a method of one object."""
    method = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(method, *args, **kwargs))


class RequestSpans:
    """Spans around the parts of one cache; see `instrument` for which method is where."""

    def __init__(self, cache: Any, tracer: trace.Tracer) -> None:
        self._cache, self._tracer = cache, tracer
        # When the pass under way began, and the requests that it refreshes.
        self._pass_began_ns = 0
        self._refreshed: list[str] = []

    # -- it arrives --

    def match(self, method: Around, params: Any) -> Any:
        """A request is matched in every round that it waits: spans are for those that found
        something else than the last."""
        context = context_of(params.req)
        if context is None:
            return method(params)
        began_ns, state = time.time_ns(), self._cache.requests.of(params.req.rid)
        state.trace_context = context
        with _attached(context):
            result = method(params)
        found = result.device_prefix_len, result.host_hit_length
        if state.traced_match != found:
            state.traced_match = found
            device, tier = found
            self._past_span(
                "kvtier.match",
                context,
                began_ns,
                {"tokens": len(params.key), "device_tokens": device, "tier_tokens": tier},
            )
        return result

    def ask(self, method: Around, handle: Any, *args: Any, **kwargs: Any) -> Any:
        with _attached(self._context_of(handle.rid)):
            return method(handle, *args, **kwargs)

    def submit(self, method: Around, work: Around, **kwargs: Any) -> Any:
        """Work in the background for whatever span this is called in."""
        if not _is_traced():
            return method(work, **kwargs)

        def traced(client: Any) -> Any:
            with self._tracer.start_as_current_span("kvtier.fetch") as span:
                result = work(client)
                span.set_attribute("came", result is not None)
                return result

        return method(traced, **kwargs)

    def restore(self, method: Around, params: Any) -> Any:
        with self._span("kvtier.restore", self._context_of(params.req.rid)) as span:
            loaded, node = method(params)
            span.set_attribute("tokens", loaded)
        return loaded, node

    # -- it computes, and ends --

    def within(self, method: Around, req: Any, **kwargs: Any) -> Any:
        with _attached(self._context_of(req.rid)):
            return method(req, **kwargs)

    def spill(self, method: Around, *args: Any, **kwargs: Any) -> Any:
        counters = self._cache.tier.spiller.counters
        before = counters["spans_spilled"], counters["spill_bytes"]
        with self._span("kvtier.spill") as span:
            result = method(*args, **kwargs)
            span.set_attribute("spans", counters["spans_spilled"] - before[0])
            span.set_attribute("bytes", counters["spill_bytes"] - before[1])
        return result

    def spill_record(self, method: Around, *args: Any) -> Any:
        with self._span("kvtier.spill") as span:
            span.set_attribute("record", value=True)
            return method(*args)

    def select(self, method: Around, node: Any, *args: Any) -> Any:
        with self._span("kvtier.select") as span:
            freed = method(node, *args)
            chosen = {} if node.choice is None else {"reason": node.choice.reason}
            span.set_attributes(
                {
                    "tokens": len(node.key),
                    "dropped_tokens": node.dropped.num_tokens,
                    "slots": node.num_slots - freed,
                    **chosen,
                }
            )
        return freed

    # -- it is refreshed, inside of a forward pass --

    def begin_pass(self, method: Around, *args: Any) -> None:
        self._pass_began_ns = time.time_ns()
        method(*args)
        self._refreshed = self._cache.refresh.refresher.refreshed_in_pass

    def end_pass(self, method: Around) -> None:
        method()
        for rid in self._refreshed:
            context = self._context_of(rid)
            if context is not None:
                self._past_span("kvtier.refresh", context, self._pass_began_ns, {})
        self._refreshed = []

    # -- below --

    def _context_of(self, rid: str) -> Any:
        state = self._cache.requests.get(rid)
        return None if state is None else state.trace_context

    @contextmanager
    def _span(self, name: str, context: Any = None) -> Iterator[trace.Span]:
        """A span in a request's context, by default in that which this is called in; one that is
        not recorded where no request is traced."""
        if context is None and not _is_traced():
            yield trace.INVALID_SPAN
            return
        with self._tracer.start_as_current_span(name, context=context) as span:
            yield span

    def _past_span(self, name: str, context: Any, began_ns: int, attributes: Attributes) -> None:
        """A span that ends now, of which only the end said whether there should be one."""
        span = self._tracer.start_span(
            name, context=context, start_time=began_ns, attributes=attributes
        )
        span.end()


def _is_traced() -> bool:
    return trace.get_current_span().get_span_context().is_valid


@contextmanager
def _attached(context: Any) -> Iterator[None]:
    """Stay within a request's context; None: that of a request that is not traced."""
    if context is None:
        yield
        return
    token = contexts.attach(context)
    try:
        yield
    finally:
        contexts.detach(token)

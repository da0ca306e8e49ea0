"""The spans of a cache's work for a traced request, which are below the request's and cost others
nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from tiered_tree_harness import shape, turn
from tree_harness import MiniScheduler, run_turn
from tree_requests import Request, context
from waiting import SAFETY_S

from kvtier.retention.shares import FixedShare
from kvtier_sglang.tracing.instrument import instrument
from kvtier_sglang.tracing.tracer import context_of, engine_tracer, interceptors


class Traced:
    """Requests of a test, each below a span of the scheduler's as SGLang makes one."""

    def __init__(self) -> None:
        self.exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")
        self.scheduler_span = self.tracer.start_span("Scheduler")

    def spans(self, name: str) -> list[ReadableSpan]:
        """The spans of that name, all of which are in the request's trace."""
        own = self.scheduler_span.get_span_context().trace_id
        found = [span for span in self.exporter.get_finished_spans() if span.name == name]
        assert all(span.context.trace_id == own for span in found)
        return found

    def below_the_request(self, name: str) -> list[dict]:
        """Attributes of the spans of that name, all of which are right below the request's."""
        parent = self.scheduler_span.get_span_context().span_id
        found = self.spans(name)
        assert all(span.parent.span_id == parent for span in found)
        return [dict(span.attributes) for span in found]


@pytest.fixture
def traced(monkeypatch) -> Iterator[Traced]:
    """Have every request traced."""
    found = Traced()
    thread = SimpleNamespace(thread_span=found.scheduler_span)
    of_request = SimpleNamespace(tracing_enable=True, thread_context=thread)
    time_stats = SimpleNamespace(trace_ctx=of_request)
    monkeypatch.setattr(Request, "time_stats", time_stats, raising=False)
    yield found
    assert not trace.get_current_span().get_span_context().is_valid, "a span was left current"


def server(traced: Traced, connect: Callable, **options) -> MiniScheduler:
    s = MiniScheduler(share=FixedShare(0.5), link=connect(), **options)
    instrument(s.tree, traced.tracer)
    return s


def test_a_turns_spans_say_what_its_cache_did(traced, connect):
    """The spans of what comes back: test_traced_run.py."""
    s = server(traced, connect)
    turn(s, context(60), [1, 2])
    assert traced.below_the_request("kvtier.match") == [
        {"tokens": 59, "device_tokens": 0, "tier_tokens": 0}
    ]
    (node,) = s.tree.nodes()
    assert traced.below_the_request("kvtier.select") == [
        {"tokens": 62, "dropped_tokens": 50, "slots": node.num_slots, "reason": "share"}
    ]
    spills = traced.below_the_request("kvtier.spill")
    counters = s.tree.tier.spiller.counters
    assert sum(one.get("spans", 0) for one in spills) == counters["spans_spilled"] > 0
    assert sum(one.get("bytes", 0) for one in spills) == counters["spill_bytes"]
    assert sum(one.get("record", False) for one in spills) == 1


def test_a_request_that_waits_is_matched_again_and_again_and_told_once_until_it_is_aborted(
    traced, connect
):
    s = server(traced, connect)
    turn(s, context(60), [1, 2])
    request = Request([*context(60), 1, 2, 9])
    key = RadixKey(request.full_untruncated_fill_ids)
    for _ in "ab":
        traced.exporter.clear()
        for _ in range(5):
            s.tree.match_prefix(MatchPrefixParams(key=key, req=request))
        assert len(traced.spans("kvtier.match")) == 1
        s.tree.release_aborted_request(CacheRequestHandle(request.rid, 0))


def test_a_request_that_is_not_traced_has_no_spans_and_the_same_answers(
    traced, connect, monkeypatch
):
    monkeypatch.delattr(Request, "time_stats")
    s, plain = server(traced, connect), MiniScheduler(share=FixedShare(0.5), link=connect())
    for one in (s, plain):
        turn(one, context(60), [1, 2])
        assert one.tree.tier.link.flush(SAFETY_S)
    assert traced.exporter.get_finished_spans() == ()
    assert shape(s) == shape(plain)


def test_what_has_no_tier_is_traced_as_well(traced):
    s = MiniScheduler()
    instrument(s.tree, traced.tracer)
    run_turn(s, context(60), [1])
    assert len(traced.below_the_request("kvtier.select")) == 1


def wrapped(s: MiniScheduler) -> set[str]:
    """Methods of a cache and its parts that are not those of their classes."""
    parts = (s.tree, s.tree.tier, s.tree.compressor, s.tree.tier.link)
    return {name for one in parts for name in vars(one) if callable(getattr(type(one), name, None))}


def test_where_sglang_does_not_trace_nothing_is_wrapped_and_no_call_intercepted(traced, connect):
    assert engine_tracer() is None
    assert interceptors() == ()
    s = MiniScheduler(link=connect())
    assert wrapped(s) == set()
    instrument(s.tree, traced.tracer)
    assert {"match_prefix", "init_load_back", "end_turn", "published", "submit"} <= wrapped(s)


def test_a_request_without_a_thread_of_its_own_is_below_its_root():
    """SGLang makes its own spans so in another process."""
    root = object()
    of_request = SimpleNamespace(tracing_enable=True, root_span_context=root)
    assert context_of(SimpleNamespace(time_stats=SimpleNamespace(trace_ctx=of_request))) is root
    of_request.tracing_enable = False
    assert context_of(SimpleNamespace(time_stats=SimpleNamespace(trace_ctx=of_request))) is None
    assert context_of(None) is None

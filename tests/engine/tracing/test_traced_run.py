"""One request's work is one trace: engine, kvtier and the tier, with the right parents."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from demo_server import GREEDY, DemoServer, demo_server
from engine_process import CLEAN_ENVIRONMENT
from otlp_collector import Collector, Span, collecting
from tierd.live_tier import live_tier
from tiered_engine import RULE, as_flags
from waiting import wait_for

pytestmark = pytest.mark.engine

# The context of the client that asks: W3C Trace Context.
TRACE_ID, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Traced(NamedTuple):
    server: DemoServer
    collector: Collector


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traced")
    with ExitStack() as stack:
        collector = stack.enter_context(collecting())
        flags = ("--memory", "256m", "--otlp-traces-endpoint", collector.address)
        tier = stack.enter_context(live_tier(folder, *flags))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name in set(CLEAN_ENVIRONMENT):
            patch.setenv(name, CLEAN_ENVIRONMENT[name])
        patch.setenv("SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS", "100")
        server = demo_server(
            folder,
            *("--max-total-tokens", "8000", "--chunked-prefill-size", "512"),
            *("--skip-tokenizer-init", "--sleep-on-idle", "--enable-trace", *as_flags(RULE)),
            *("--tier", tier.address, "--tier-timeout-s", "60", "--tier-patience-s", "600"),
            *("--no-tier-shared-memory", "--retention", "0.5", "--refresh", "turn"),
            *("--otlp-traces-endpoint", collector.address),
        )
        yield Traced(stack.enter_context(server), collector)


def test_a_request_that_is_restored_and_refreshed_is_one_trace_from_engine_to_tier(traced):
    rng = random.Random(1)
    prompt = [rng.randrange(136, 384) for _ in range(1000)]
    prompt += traced.server.generate(prompt, 4)["output_ids"]
    assert traced.server.state()["tier"]["healthy"]
    wait_for(lambda: not traced.server.state()["tier"]["pending"])
    traced.server.flush()
    prompt += [rng.randrange(136, 384) for _ in range(100)]
    header = {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-01"}
    sampling = {**GREEDY, "max_new_tokens": 4}
    body = {"input_ids": prompt, "sampling_params": sampling}
    _, answer = traced.server.call("/generate", body, headers=header)
    assert json.loads(answer)["meta_info"]["cached_tokens"] >= 1000

    wanted = {"kvtier.restore", "kvtier.refresh", "kvtier.select", "kvtier.spill"}
    ids = bytes.fromhex(TRACE_ID)

    def complete(spans: Sequence[Span]) -> bool:
        own = [one for one in spans if one.trace_id == ids]
        puts = [one for one in own if one.method == "Put" and one.service == "kvtier-tier"]
        roots = [one for one in own if one.parent_id == bytes.fromhex(CLIENT_SPAN)]
        return wanted <= {one.name for one in own} and bool(puts) and bool(roots)

    spans = traced.collector.wait_for(complete)
    own = {one.span_id: one for one in spans if one.trace_id == ids}
    (root,) = (one for one in own.values() if one.parent_id == bytes.fromhex(CLIENT_SPAN))
    assert root.service == "sglang"
    for span in own.values():
        if span.service == "kvtier-tier":
            parent = own[span.parent_id]
            assert (parent.service, parent.name) == ("sglang", span.name)
        elif span.name.startswith("kvtier.v1."):
            assert own[span.parent_id].name in ("kvtier.fetch", "kvtier.spill")
        elif span.name.startswith("kvtier."):
            assert own[span.parent_id].name.startswith("Scheduler"), span.name
    by_name = {one.name: one for one in own.values()}
    assert by_name["kvtier.restore"].attributes["tokens"] == 1003
    select = next(one for one in own.values() if one.attributes.get("reason") == "share")
    assert select.name == "kvtier.select"
    methods = {one.method for one in own.values() if one.service == "kvtier-tier"}
    assert {"Exists", "Get", "Put"} <= methods
    matches = [one.attributes for one in own.values() if one.name == "kvtier.match"]
    assert {"tokens": 1103, "device_tokens": 0, "tier_tokens": 1003} in matches


def test_spans_say_nothing_of_what_was_asked(traced):
    """Numbers, names and reasons alone."""
    traced.server.generate([random.Random(2).randrange(136, 384) for _ in range(300)], 4)
    spans = traced.collector.wait_for(lambda found: any(s.name == "kvtier.select" for s in found))
    known = {"tokens", "device_tokens", "tier_tokens", "dropped_tokens", "slots"}
    known |= {"reason", "spans", "bytes", "record", "came"}
    for span in spans:
        if span.name.startswith("kvtier.") and not span.name.startswith("kvtier.v1"):
            assert set(span.attributes) <= known
            for name, value in span.attributes.items():
                assert isinstance(value, int) or (name, value) == ("reason", "share")

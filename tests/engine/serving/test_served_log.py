"""A served run, and what is told of its prompts: in OpenAI's usage, on `/metrics`, on the status
page, and by its log, which the planner reads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from demo_server import demo_server
from waiting import wait_for

from kvtier.traffic.formats import read_trace
from kvtier.traffic.prefixes import traffic_of
from kvtier.traffic.request_log import Logged, read_log

pytestmark = pytest.mark.engine

rng = random.Random(7)
CONTEXT = [rng.randrange(136, 384) for _ in range(1500)]
OTHERS = [[rng.randrange(136, 384) for _ in range(1500)] for _ in range(4)]


class Run(NamedTuple):
    """usages: OpenAI's, of each request; told, log: the lines of the log, and where it is; metrics:
    kvtier's; replica: its status page's."""

    usages: list[dict[str, Any]]
    told: list[Logged]
    log: Path
    metrics: dict[str, float]
    replica: dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder, usages = tmp_path_factory.mktemp("served"), []
    log = folder / "requests.jsonl"
    flags = [
        *("--max-total-tokens", "4096", "--chunked-prefill-size", "512"),
        *("--retention", "0.5", "--head-budgets", "equal"),
        *("--request-log", str(log), "--enable-cache-report", "--enable-metrics"),
        # Its own request would be the log's first.
        "--skip-server-warmup",
    ]
    with demo_server(folder, *flags) as server:

        def ask(prompt: list[int], **more: Any) -> None:
            body = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
            usages.append(json.loads(server.post("/v1/completions", body))["usage"])

        ask(CONTEXT)
        ask([*CONTEXT, *OTHERS[0][:100]], session_id="the client's own")
        ask([*OTHERS[1][:40], *CONTEXT[20:]])
        for other in OTHERS:
            ask(other)
        ask([*CONTEXT, *OTHERS[0][:100]], session_id="the client's own")
        server.flush()
        ask(OTHERS[3])
        # A health check has no line.
        server.get("/health_generate")
        wait_for(lambda: log.is_file() and len(log.read_text().splitlines()) == 9)
        told = list(read_log(log))
        hits = sum(one.hit for one in told)
        wait_for(lambda: server.samples().get("kvtier_hit_tokens_total") == hits)
        (replica,) = json.loads(server.get("/kvtier/status.json"))["replicas"]
        assert "1,499 flushed" in server.get("/kvtier/status")
        return Run(usages, told, log, server.samples(), replica)


def test_cached_tokens_of_openais_usage_are_what_was_hit_or_restored(run):
    usages, told = run.usages, run.told
    assert [one["prompt_tokens"] for one in usages] == [one.tokens for one in told]
    cached = [(one["prompt_tokens_details"] or {}).get("cached_tokens", 0) for one in usages]
    assert cached == [one.hit + one.restored for one in told]


def test_every_prompt_says_why_it_was_computed(run):
    told = run.told
    assert [one.hit + one.computed for one in told] == [one.tokens for one in told]
    first, second, edited, *_, again, flushed = told
    assert (first.hit, first.recomputed) == (0, {})
    assert (second.hit, second.recomputed) == (1500, {})
    assert set(edited.recomputed) == {"edited"}
    assert edited.recomputed["edited"] >= 1400
    assert edited.changed_at == 0
    assert set(again.recomputed) <= {"evicted", "cut", "edited"}
    assert again.recomputed["evicted"] >= 1400
    assert flushed.recomputed == {"flushed": 1499}
    assert second.session == again.session
    assert len({one.session for one in told}) > 4


def test_metrics_sum_up_to_the_lines(run):
    told, found = run.told, run.metrics
    for reason in ("evicted", "edited", "flushed", "weights", "lost"):
        tokens = sum(one.recomputed.get(reason, 0) for one in told)
        assert found[f"kvtier_recomputed_tokens_total {reason}"] == tokens
    new = sum(one.computed - one.recomputed_tokens for one in told)
    assert found["kvtier_new_tokens_total"] == new


def test_the_status_page_has_the_last_prompt_of_each_session(run):
    last = [row["last_prompt"] for row in run.replica["sessions"]["rows"]]
    # The other is the health check's.
    (told,) = [prompt for prompt in last if prompt is not None]
    assert told == {
        "tokens": 1500, "hit": 0, "restored": 0, "computed": 1500,
        "recomputed": {"flushed": 1499},
    }  # fmt: skip


def test_the_planner_reads_the_log(run):
    told, trace = run.told, read_trace(run.log)
    assert [one.input_tokens for one in trace.requests] == [one.tokens for one in told]
    traffic = traffic_of(trace)
    assert traffic.num_sessions == len({one.session for one in told})
    # The second request's first two blocks are the first one's.
    first, second = (one.block_ids for one in trace.requests[:2])
    assert first[:2] == second[:2]
    assert first[2] != second[2]

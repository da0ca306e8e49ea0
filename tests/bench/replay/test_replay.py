"""A replay: its flags, its prompts, what it makes of answers, and the command."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from fake_worker import FakeEngine
from traffic.trace_models import make_trace, write_trace

from kvtier.bench.__main__ import main
from kvtier.bench.engine import Answer, Arrival, SglangEngine, StreamClock, _answer
from kvtier.bench.options import parse_options
from kvtier.bench.planning import make_plans
from kvtier.bench.replay.measure import (
    MISSES_IN_A_ROW,
    Prompts,
    find_resident,
    meets,
    replay_plan,
)
from kvtier.bench.replay.schema import Percentiles, ReplayDocument, ReplayRecord
from kvtier.bench.schema import Replay
from kvtier.errors import BudgetError, SizeError, TracesFileError, UsageError
from kvtier.traffic.continuations import find_continuations, sessions_of

WORDS = range(40, 300)


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "small.jsonl", make_trace(3, conversations=10))


@pytest.fixture
def flags(model_path: Path, trace_file: Path) -> list[str]:
    scaled = ["--trace", str(trace_file), "--block-tokens", "32"]
    return [*scaled, "--model-path", str(model_path), "--device", "cpu"]


@pytest.mark.parametrize(
    ("more", "kind", "argument"),
    [
        (["--requests", "0"], UsageError, "--requests"),
        (["--requests", "10000"], UsageError, "--requests"),
        (["--block-tokens", "x"], UsageError, "--block-tokens"),
        (["--speed", "-1"], UsageError, "--speed"),
        (["--slo-ttft", "nan"], UsageError, "--slo-ttft"),
        (["--turns", "3"], UsageError, "--turns"),
        (["--len", "4k"], UsageError, "--len"),
        (["--block-tokens", "5000"], SizeError, "--block-tokens"),
        (["--budget-sessions", "1"], BudgetError, "--budget-sessions"),
    ],
)
def test_bad_input_is_refused_by_its_flag(flags, more, kind, argument):
    with pytest.raises(UsageError) as caught:
        make_plans(parse_options([*flags, *more]))
    assert type(caught.value) is kind
    assert caught.value.argument == argument


def test_flags_of_a_replay_want_a_trace(model_path: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="--speed: expected a --trace"):
        parse_options(["--speed", "2", "--model-path", str(model_path)])
    (tmp_path / "bad").write_text("{}\n")
    with pytest.raises(TracesFileError, match="line 1: hash_ids"):
        parse_options(["--trace", str(tmp_path / "bad"), "--model-path", str(model_path)])


def test_all_policies_get_the_same_bytes_and_the_longest_request_fits(flags, monkeypatch):
    for name in ("RECENT_TOKENS", "BRANCH_RECENT_TOKENS"):
        monkeypatch.setenv(f"KVTIER_LOCALITY_{name}", "16")
    _, plans = make_plans(parse_options([*flags, "--policies", "full,kvtier"]))
    full, kvtier = (entry.plan for entry in plans)
    assert full.pools.budget_bytes == kvtier.pools.budget_bytes
    assert isinstance(full.workload, Replay)
    assert full.pools.sessions == pytest.approx(32, rel=0.02)
    assert kvtier.pools.max_total_tokens == pytest.approx(full.pools.max_total_tokens, rel=0.05)
    assert kvtier.pools.max_total_tokens > full.workload.longest_tokens
    assert kvtier.pools.sessions > full.pools.sessions


def test_equal_ids_are_equal_tokens_and_a_turn_repeats_the_prompt_that_it_goes_on_with():
    trace = make_trace(5, conversations=6, turns=4).scaled(16, 1.0)
    prompts, again = (Prompts(trace, WORDS, seed=1) for _ in range(2))
    for index, request in enumerate(trace.requests):
        ids = prompts.ids(index)
        assert ids == again.ids(index)
        assert len(ids) == request.input_tokens
        assert set(ids) <= set(WORDS)
        for other, earlier in enumerate(trace.requests[:index]):
            common = 0
            for a, b in zip(request.block_ids, earlier.block_ids, strict=False):
                common += a == b
            whole = min(common, trace.whole_blocks(request), trace.whole_blocks(earlier))
            assert ids[: whole * 16] == prompts.ids(other)[: whole * 16]
    assert Prompts(trace, WORDS, seed=2).ids(0) != prompts.ids(0)
    found = find_continuations(trace).next_request
    assert found
    for earlier, later in found.items():
        before = prompts.ids(earlier)
        assert prompts.ids(later)[: len(before)] == before
        assert sessions_of(trace)[earlier] == sessions_of(trace)[later]


def record(**changes) -> ReplayRecord:
    values = {
        "index": 0, "conversation": 0, "arrival_s": 0.0, "prompt_tokens": 10, "cached_tokens": 0,
        "restored_tokens": 0, "output_tokens": 11, "ttft_ms": 100.0, "latency_ms": 600.0,
    }  # fmt: skip
    return ReplayRecord(**(values | changes))


def test_goodput_wants_both_times(flags):
    replay = parse_options([*flags, "--slo-ttft", "100", "--slo-tpot", "50"]).workload
    assert record().tpot_ms == 50
    assert meets(record(), replay)
    assert not meets(record(ttft_ms=100.1), replay)
    assert not meets(record(latency_ms=601.0), replay)
    assert record(output_tokens=1).tpot_ms is None
    assert meets(record(output_tokens=1, latency_ms=100.0), replay)
    assert Percentiles.of([]).p99 == 0
    assert Percentiles.of([1.0, 2.0, 3.0]).p50 == 2


def test_a_run_over_an_engine_says_what_came_of_every_request(flags):
    (entry,) = make_plans(parse_options([*flags, "--policies", "full"]))[1]
    engines = []

    def open_engine(plan):
        engines.append(FakeEngine(plan))
        return engines[0]

    events = []
    result = replay_plan(entry.plan, open_engine, events.append)
    assert engines[0].closed
    replay = entry.plan.workload
    assert [one.index for one in result.requests] == list(range(replay.requests))
    prompts = sum(one.prompt_tokens for one in result.requests)
    cached = sum(one.cached_tokens for one in result.requests)
    assert result.summary.hit_rate == pytest.approx(cached / prompts)
    assert cached > 0
    assert 0 < result.summary.resident <= replay.conversations
    assert [e["done"] for e in events if e["event"] == "replayed"][-1] == replay.requests


class Remembering:
    """An engine that has some prompts."""

    def __init__(self, held: set[int]) -> None:
        self.held, self.asked = held, []

    def generate(self, input_ids, max_new_tokens, stop_ids) -> Answer:
        (number,) = set(input_ids)
        self.asked.append(number)
        return Answer((1,), 99 if number in self.held else 0, 1.0, 1.0)


def test_conversations_are_asked_for_from_the_newest_back_until_many_in_a_row_are_gone():
    arrivals = [Arrival(float(i), (i,) * 100, 1) for i in range(30)]
    answers = [Answer((1,), 0, 1.0, 1.0, sent_s=one.at_s) for one in arrivals]
    engine = Remembering(held={29, 27, 26, 3})
    assert find_resident(engine, arrivals, answers, list(range(30)), [2]) == [29, 27, 26]
    assert engine.asked == list(range(29, 26 - MISSES_IN_A_ROW - 1, -1))


def test_a_request_is_sent_when_the_answer_that_it_waits_for_is_there():
    """The first is answered when the second was."""
    engine = SglangEngine.__new__(SglangEngine)
    seen: list[tuple[str, int]] = []

    async def replay() -> list[Answer]:
        second = asyncio.Event()

        async def stream(input_ids: tuple[int, ...], start: float, more: dict) -> Answer:
            (number,) = input_ids
            seen.append(("sent", number))
            if number == 1:
                await second.wait()
            seen.append(("answered", number))
            if number == 2:
                second.set()
            return Answer((1,), 0, 1.0, 50.0)

        engine._stream = stream
        arrivals = [Arrival(0.0, (1,), 1), Arrival(0.0, (2,), 1), Arrival(0.25, (3,), 1, after=0)]
        return await engine._replay(arrivals, lambda index, answer: None)

    answers = asyncio.run(replay())
    assert seen[-4:] == [("answered", 2), ("answered", 1), ("sent", 3), ("answered", 3)]
    assert [one.sent_s for one in answers[:2]] == [0.0, 0.0]
    assert answers[2].sent_s > 0.25


class Aborting:
    """SGLang's engine, where there is no room."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    async def async_generate(self, **asked):
        async def chunks():
            reason = {"type": "abort", "message": "no room"}
            yield {"meta_info": {"completion_tokens": 0, "finish_reason": reason}}

        return chunks()


def test_a_request_that_is_aborted_ends_the_replay():
    """The time of such a request is none of an answer's."""
    engine = SglangEngine.__new__(SglangEngine)
    engine._engine = Aborting()
    with pytest.raises(ExceptionGroup) as caught:
        engine.replay([Arrival(0.0, (1,) * 100, 1)], lambda index, answer: None)
    engine._engine.loop.close()
    assert "a request of 100 tokens ended with" in str(caught.value.exceptions[0])
    assert "no room" in str(caught.value.exceptions[0])


@pytest.mark.usefixtures("faked")
def test_table_json_and_page_of_a_replay(flags, tmp_path, capsys, monkeypatch):
    out, report = tmp_path / "out.json", tmp_path / "out.html"
    files = ["--json", str(out), "--report", str(report)]
    assert main([*flags, "--dry-run"]) == 0
    assert main([*flags, *files]) == 0
    printed = capsys.readouterr()
    assert "goodput (TTFT ≤ 2000 ms, TPOT ≤ 50 ms)" in printed.out
    assert "requests answered" in printed.err
    document = ReplayDocument.model_validate_json(out.read_text())
    assert [run.policy for run in document.runs] == ["full", "kvtier"]
    page = report.read_text()
    assert "Tokens hit, by arrival" in page
    assert "http" not in page
    assert "<script" not in page
    monkeypatch.setenv("FAKE_WORKER", "crash")
    assert main([*flags, *files, "-q"]) == 1
    assert "no such weights" in capsys.readouterr().err
    assert json.loads(out.read_text())["runs"] == []
    assert "failed (exit code" in report.read_text()


@pytest.mark.parametrize(
    ("told", "restored"),
    [
        ({"device": 20, "host": 0, "storage": 70}, 70),
        ({"device": 20, "host": 0}, 0),
        (None, 0),
    ],
)
def test_what_a_tier_brought_is_told_from_what_was_on_the_device(told, restored):
    clock = StreamClock()
    clock.see(1)
    info = {"cached_tokens": 90, "cached_tokens_details": told}
    assert _answer(clock, {"output_ids": [1], "meta_info": info}).restored_tokens == restored

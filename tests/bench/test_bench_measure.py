"""The measuring loop over a fake engine, and the arithmetic on what it measured."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from fake_worker import FakeEngine

from kvtier.bench.engine import EngineError, Scored, StreamClock
from kvtier.bench.measure import run_plan
from kvtier.bench.metrics import compare, compare_all
from kvtier.bench.options import parse_options
from kvtier.bench.planning import make_plans
from kvtier.bench.schema import RunResult


def run(folder: Path, policy: str, *flags: str) -> tuple[RunResult, FakeEngine]:
    given = ["--len", "512", "--model-path", str(folder), "--policies", policy, *flags]
    _, (entry,) = make_plans(parse_options(given))
    engine = FakeEngine(entry.plan)
    return run_plan(entry.plan, lambda plan: engine, lambda event: None), engine


def test_a_session_continues_with_what_the_model_said_and_branches_leave_no_trace(model_path: Path):
    result, engine = run(model_path, "full", "--turns", "3", "--questions", "3")
    assert engine.closed
    asked = engine.requests[-9:]
    main_line, branches = asked[::3], [r for i, r in enumerate(asked) if i % 3]
    for before, after in pairwise(main_line):
        assert after[: len(before)] == before
    for number, branch in enumerate(branches):
        prefix = len(main_line[number // 2]) + 11
        assert len(branch) == prefix + 17
        following = main_line[number // 2 + 1 :]
        assert all(branch[:prefix] == later[:prefix] for later in following)
        assert all(branch != later[: len(branch)] for later in following)
    assert [turn.turn for turn in result.turns] == [1, 2, 3]
    assert [turn.prompt_tokens for turn in result.turns] == [529, 557, 585]
    assert result.summary.recall == 1.0


def test_an_answer_that_was_invented_is_the_right_one_when_asked_again(model_path: Path):
    for seed in range(20):
        given = ["--turns", "6", "--questions", "1", "--seed", str(seed)]
        result, _ = run(model_path, "full", *given)
        if any(request.recall is None for request in result.requests):
            assert result.summary.recall == 1.0
            return
    pytest.fail("no seed led to an invented answer")


def test_right_answers_are_scored_after_the_last_turn_by_what_the_policy_serves(model_path: Path):
    result, engine = run(model_path, "full", "--turns", "2", "--questions", "3", "--seed", "3")
    # The first question of all is answered before anything is dropped, and an answer that is
    # invented has nothing to be scored by.
    scored = [request for request in result.requests if request.nll is not None]
    assert [request.nll for request in scored] == pytest.approx([math.log(2)] * len(scored))
    assert result.requests[0].nll is None
    known = [request for request in result.requests[1:] if request.recall is not None]
    assert scored == known
    assert len(engine.scored) == len(scored), "one request for an answer that is right"
    for (prompt, wanted), request in zip(engine.scored, scored, strict=True):
        assert len(prompt) == request.prompt_tokens
        assert wanted == request.output_ids[:-1]
    assert [turn.nll_questions for turn in result.turns] == [
        sum(request.turn == turn for request in scored) for turn in (1, 2)
    ]
    assert result.summary.nll == pytest.approx(math.log(2))
    assert compare(result, result).nll == pytest.approx(1)


def test_a_history_that_had_to_be_computed_again_has_no_nll(model_path: Path, monkeypatch):
    def again(self, ids, wanted):
        return Scored(tuple(wanted), (0.0,) * len(wanted), len(ids) - 40)

    monkeypatch.setattr(FakeEngine, "score", again)
    result, _ = run(model_path, "full")
    assert result.summary.nll is None
    assert compare(result, result).nll is None


def test_residency_is_counted_per_turn_and_at_the_end(model_path: Path):
    tight, engine = run(model_path, "full", "--sessions", "5", "--turns", "3")
    assert [turn.resident_sessions for turn in tight.turns] == [None, 0, 0]
    assert tight.summary.resident_sessions == sum(len(kept) > 512 for kept in engine.kept)
    assert tight.summary.resident_sessions in (2, 3)
    assert engine.scored == [], "scoring would evict"
    roomy, _ = run(model_path, "full", "--sessions", "5", "--budget-sessions", "8", "--turns", "3")
    assert [turn.resident_sessions for turn in roomy.turns] == [None, 5, 5]
    assert roomy.summary.resident_sessions == 5


def test_ratios_are_bigger_when_kvtier_is_better(model_path: Path):
    flags = ["--turns", "2", "--questions", "2"]
    full, kvtier, stock = (run(model_path, name, *flags)[0] for name in ("full", "kvtier", "stock"))
    pair = compare(full, kvtier)
    assert pair.kv_device_bytes == pytest.approx(4.0, rel=0.01)
    assert pair.recall == pytest.approx(1.0)
    slower = kvtier.model_copy(
        update={"summary": kvtier.summary.model_copy(update={"median_tpot_ms": 4.0, "recall": 0.5})}
    )
    assert compare(full, slower).median_tpot_ms == pytest.approx(0.5)
    assert compare(full, slower).recall == pytest.approx(0.5)
    main, others = compare_all([stock, full, kvtier])
    assert main is not None
    assert (main.baseline, main.policy) == ("full", "kvtier")
    assert [(p.baseline, p.policy) for p in others] == [("stock", "full"), ("stock", "kvtier")]
    assert compare_all([stock])[0] is None
    # Nothing to compare is None, and not a division by zero.
    silent = full.model_copy(update={"summary": full.summary.model_copy(update={"recall": None})})
    assert compare(silent, full).recall is None
    assert compare(full, silent).recall is None


def test_the_clock_times_the_first_token_and_the_last():
    times = iter([10.0, 10.5, 10.6, 10.9])
    clock = StreamClock(now=lambda: next(times))
    for tokens in (1, 2, 2, 5):
        clock.see(tokens)
    answer = clock.answer([1, 2, 3, 4, 5], 7)
    assert answer.ttft_ms == pytest.approx(500)
    assert answer.latency_ms == pytest.approx(900)
    with pytest.raises(EngineError):
        StreamClock().answer([], 0)

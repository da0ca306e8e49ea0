"""The measuring loop: hold the sessions of a plan with an engine, one request at a time.

Sessions are interleaved by turn, as an agent server sees them: turn 1 of every session, then
turn 2 of every session, … With a budget too small for all of them, what was evicted since a
session's last turn has to be computed again, and its time to first token shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.bench.engine import Answer, ChatEngine, EngineFactory
from kvtier.bench.metrics import is_resident, summarize, turn_results
from kvtier.bench.schema import Occupancy, Plan, RequestRecord, RetainedTurn, RunResult
from kvtier.bench.workload import PlannedSession, plan_sessions
from kvtier.synthetic.recall import ANSWER_TOKENS, DEFAULT_LANGUAGE, Turn, score_answer

# Long enough to touch every code path, short enough to cost nothing.
WARM_UP_TOKENS = 64
# How long a turn's KV may take on its way to the tier.
TIER_PATIENCE_S = 30.0

Emit = Callable[[dict[str, object]], None]


@dataclass
class Conversation:
    """A session under way: `history` holds every token said so far, by either side."""

    index: int
    planned: PlannedSession
    history: list[int] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history = self.planned.session.context_ids.tolist()

    def take_answer(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Continue with what the model really said; an answer cut short is closed by `<eot>`."""
        self.history += [*prompt_ids, *output_ids]
        if output_ids[-1] != DEFAULT_LANGUAGE.eot:
            self.history.append(DEFAULT_LANGUAGE.eot)
        self.answers.append(tuple(t for t in output_ids if t != DEFAULT_LANGUAGE.eot))


def run_plan(plan: Plan, open_engine: EngineFactory, emit: Emit) -> RunResult:
    """Run one policy from start to end; the engine is closed whatever happens."""
    emit({"event": "loading"})
    began = time.perf_counter()
    engine = open_engine(plan)
    try:
        warm_up(engine)
        load_s = time.perf_counter() - began
        emit({"event": "ready", "load_s": load_s})
        capacity = engine.occupancy().kv_capacity_bytes
        talks = [Conversation(i, planned) for i, planned in enumerate(plan_sessions(plan.workload))]
        began = time.perf_counter()
        records = hold_sessions(engine, talks, plan.workload.turns, emit)
        resident = count_resident(engine, talks) if len(talks) > 1 else None
        tier = engine.occupancy().tier
        wall_s = time.perf_counter() - began
    finally:
        engine.close()
    turns = turn_results(records)
    return RunResult(
        policy=plan.policy,
        ca_share=plan.ca_share,
        pools=plan.pools,
        kv_capacity_bytes=capacity,
        load_s=load_s,
        wall_s=wall_s,
        device=engine.device,
        turns=turns,
        summary=summarize(records, turns, resident),
        tier=tier,
        requests=tuple(records),
    )


def warm_up(engine: ChatEngine) -> None:
    """Pay one-off costs (thread pools, kernel compilation) before anything is timed."""
    filler = [DEFAULT_LANGUAGE.bos, *DEFAULT_LANGUAGE.filler[:WARM_UP_TOKENS]]
    for length in (len(filler) // 2, len(filler)):
        engine.generate(filler[:length], 3, DEFAULT_LANGUAGE.eot)
    engine.flush()


def hold_sessions(
    engine: ChatEngine, talks: Sequence[Conversation], turns: int, emit: Emit
) -> list[RequestRecord]:
    """Every request of the workload, in the order served."""
    records = []
    for turn in range(turns):
        for talk in talks:
            emit({"event": "turn", "session": talk.index, "turn": turn + 1})
            for record in _hold_turn(engine, talk, turn):
                records.append(record)
                emit({"event": "request", **record.model_dump(exclude={"output_ids", "itl_ms"})})
    return records


def _hold_turn(engine: ChatEngine, talk: Conversation, turn: int) -> list[RequestRecord]:
    asked = talk.planned.session.turns[turn]
    before = engine.occupancy()  # starts the peak of this turn
    answer = _ask(engine, talk, asked)
    after = settled(engine)
    retained = after.newest if after.compacted_turns > before.compacted_turns else None
    records = [_record(talk, turn, 0, asked, answer, after, retained)]
    talk.take_answer(asked.prompt_ids, answer.output_ids)
    for number, question in enumerate(talk.planned.branches[turn], start=1):
        answer = _ask(engine, talk, question)
        records.append(_record(talk, turn, number, question, answer))
    return records


def settled(engine: ChatEngine) -> Occupancy:
    """What the pools hold after a turn, once its KV has reached the tier: people and tools take
    longer than that between turns. The first reading has the peak."""
    first = last = engine.occupancy()
    deadline = time.monotonic() + TIER_PATIENCE_S
    while last.tier is not None and last.tier.pending and time.monotonic() < deadline:
        time.sleep(0.01)
        last = engine.occupancy()
    return first.model_copy(update={"tier": last.tier})


def _ask(engine: ChatEngine, talk: Conversation, asked: Turn) -> Answer:
    return engine.generate([*talk.history, *asked.prompt_ids], ANSWER_TOKENS, DEFAULT_LANGUAGE.eot)


def _record(
    talk: Conversation,
    turn: int,
    question: int,
    asked: Turn,
    answer: Answer,
    occupancy: Occupancy | None = None,
    retained: RetainedTurn | None = None,
) -> RequestRecord:
    """A request's outcome, scored against what could be known before it was asked."""
    expected = asked.expected(talk.answers)
    score = None if expected is None else score_answer(expected, answer.output_ids)
    return RequestRecord(
        session=talk.index,
        turn=turn + 1,
        question=question,
        prompt_tokens=len(talk.history) + len(asked.prompt_ids),
        cached_tokens=answer.cached_tokens,
        output_ids=answer.output_ids,
        ttft_ms=answer.ttft_ms,
        latency_ms=answer.latency_ms,
        itl_ms=answer.itl_ms,
        recall=None if score is None else score.codes,
        strict=None if score is None else score.strict,
        occupancy=occupancy,
        retained=retained,
    )


def count_resident(engine: ChatEngine, talks: Sequence[Conversation]) -> int:
    """Sessions still cached after the last turn, by asking for one more token of each.

    From the most recently served back: a hit evicts nothing, and under LRU everything older than
    the first miss is gone as well, so the count stops there.
    """
    for count, talk in enumerate(reversed(talks)):
        prompt = [*talk.history, DEFAULT_LANGUAGE.user]
        answer = engine.generate(prompt, 1, DEFAULT_LANGUAGE.eot)
        if not is_resident(answer.cached_tokens, len(talk.history)):
            return count
    return len(talks)

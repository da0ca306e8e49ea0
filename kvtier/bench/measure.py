"""The measuring loop: hold the sessions of a plan with an engine, one request at a time.

Sessions are interleaved by turn, as an agent server sees them: turn 1 of every session, then turn 2
of every session, and so on. With a budget too small for all of them, what was evicted since a
session's last turn has to be computed again, and its time to first token shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvtier.bench.engine import Answer, ChatEngine, EngineFactory
from kvtier.bench.metrics import is_resident, summarize, turn_results
from kvtier.bench.schema import Occupancy, Plan, RequestRecord, RetainedTurn, RunResult, Workload
from kvtier.bench.scoring import answer_nll
from kvtier.bench.workload import open_script, plan_sessions
from kvtier.synthetic.script import Script, ScriptedSession, Turn

# The longest that a turn's KV may take on its way to the tier.
TIER_PATIENCE_S = 30.0

Emit = Callable[[dict[str, object]], None]


@dataclass
class Conversation:
    """A session under way: `history` holds every token said so far, by either side."""

    index: int
    planned: ScriptedSession
    script: Script
    history: list[int] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history = list(self.planned.context_ids)

    def take_answer(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Continue with what the model really said; an answer cut short is closed."""
        stops = self.script.stop_ids
        self.history += [*prompt_ids, *output_ids]
        if output_ids[-1] not in stops:
            self.history += self.script.closing_ids
        self.answers.append(tuple(token for token in output_ids if token not in stops))


@dataclass(frozen=True)
class Asked:
    """A question that was asked, with what is needed to score its right answer later.

    right: None where there was none
    """

    record: RequestRecord
    prompt_ids: tuple[int, ...]
    right: tuple[int, ...] | None


def run_plan(plan: Plan, open_engine: EngineFactory, emit: Emit) -> RunResult:
    """Run one policy from start to end; the engine is closed whatever happens."""
    emit({"event": "loading"})
    workload = plan.workload
    assert isinstance(workload, Workload), "another kind of workload is another module's"
    script = open_script(workload.script, plan.engine_args["model_path"])
    sessions = plan_sessions(workload, script)
    began = time.perf_counter()
    engine = open_engine(plan)
    try:
        warm_up(engine, script.warm_up_ids, script.stop_ids)
        load_s = time.perf_counter() - began
        emit({"event": "ready", "load_s": load_s})
        capacity = engine.occupancy().kv_capacity_bytes
        talks = [Conversation(i, planned, script) for i, planned in enumerate(sessions)]
        began = time.perf_counter()
        asked = hold_sessions(engine, talks, workload.turns, emit)
        resident = count_resident(engine, talks) if len(talks) > 1 else None
        tier = engine.occupancy().tier
        wall_s = time.perf_counter() - began
        if workload.scores_nll:
            emit({"event": "scoring", "questions": len(asked)})
            asked = [score(engine, each, script.unscored) for each in asked]
    finally:
        engine.close()
    records = [each.record for each in asked]
    turns = turn_results(records)
    return RunResult(
        policy=plan.policy,
        recall_means=script.recall_means,
        ca_share=plan.ca_share,
        heads_compete=plan.heads_compete,
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


def warm_up(engine: ChatEngine, filler: Sequence[int], stop_ids: Sequence[int]) -> None:
    """Pay one-off costs (thread pools, kernel compilation) before anything is timed."""
    for length in (len(filler) // 2, len(filler)):
        engine.generate(filler[:length], 3, stop_ids)
    engine.flush()


def hold_sessions(
    engine: ChatEngine, talks: Sequence[Conversation], turns: int, emit: Emit
) -> list[Asked]:
    """Every request of the workload, in the order served."""
    everything = []
    for turn in range(turns):
        for talk in talks:
            emit({"event": "turn", "session": talk.index, "turn": turn + 1})
            for asked in _hold_turn(engine, talk, turn):
                everything.append(asked)
                shown = asked.record.model_dump(exclude={"output_ids", "itl_ms"})
                emit({"event": "request", **shown})
    return everything


def _hold_turn(engine: ChatEngine, talk: Conversation, turn: int) -> list[Asked]:
    asked = talk.planned.turns[turn]
    before = engine.occupancy()  # starts the peak of this turn
    answer = _ask(engine, talk, asked)
    after = settled(engine)
    retained = after.newest if after.compacted_turns > before.compacted_turns else None
    everything = [_asked(talk, turn, 0, asked, answer, after, retained)]
    talk.take_answer(asked.prompt_ids, answer.output_ids)
    for number, question in enumerate(talk.planned.branches[turn], start=1):
        answer = _ask(engine, talk, question)
        everything.append(_asked(talk, turn, number, question, answer))
    return everything


def settled(engine: ChatEngine) -> Occupancy:
    """Wait until a turn's KV has reached the tier, and return what the pool holds then: people and
    tools take longer than that between turns. The first reading has the peak."""
    first = last = engine.occupancy()
    deadline = time.monotonic() + TIER_PATIENCE_S
    while last.tier is not None and last.tier.pending and time.monotonic() < deadline:
        time.sleep(0.01)
        last = engine.occupancy()
    return first.model_copy(update={"tier": last.tier})


def _ask(engine: ChatEngine, talk: Conversation, asked: Turn) -> Answer:
    script = talk.script
    return engine.generate([*talk.history, *asked.prompt_ids], script.max_answer, script.stop_ids)


def _asked(
    talk: Conversation,
    turn: int,
    question: int,
    asked: Turn,
    answer: Answer,
    occupancy: Occupancy | None = None,
    retained: RetainedTurn | None = None,
) -> Asked:
    """A request's outcome, judged by what could be known before it was asked."""
    right = asked.expected(talk.answers)
    judged = None if right is None else talk.script.judge(right, answer.output_ids)
    prompt_ids = (*talk.history, *asked.prompt_ids)
    record = RequestRecord(
        session=talk.index,
        turn=turn + 1,
        question=question,
        prompt_tokens=len(prompt_ids),
        history_tokens=len(talk.history),
        cached_tokens=answer.cached_tokens,
        output_ids=answer.output_ids,
        ttft_ms=answer.ttft_ms,
        latency_ms=answer.latency_ms,
        itl_ms=answer.itl_ms,
        recall=None if judged is None else judged.recall,
        strict=None if judged is None else judged.strict,
        occupancy=occupancy,
        retained=retained,
    )
    return Asked(record, prompt_ids, right)


def score(engine: ChatEngine, asked: Asked, unscored: int) -> Asked:
    """Return the answer with the NLL of the right one, where RunResult says that there is one."""
    record, right = asked.record, asked.right
    before_anything_is_dropped = record.turn == 1 and record.question == 0
    if right is None or len(right) <= unscored or before_anything_is_dropped:
        return asked
    nll, cached = answer_nll(engine, asked.prompt_ids, right, unscored)
    if cached < record.history_tokens:
        return asked
    return replace(asked, record=record.model_copy(update={"nll": nll}))


def count_resident(engine: ChatEngine, talks: Sequence[Conversation]) -> int:
    """Sessions still cached after the last turn, by asking for one more token of each.

    From the most recently served back: a hit evicts nothing, and under LRU everything older than
    the first miss is gone as well, so the count stops there.
    """
    for count, talk in enumerate(reversed(talks)):
        prompt = [*talk.history, talk.script.warm_up_ids[0]]
        answer = engine.generate(prompt, 1, talk.script.stop_ids)
        if not is_resident(answer.cached_tokens, len(talk.history)):
            return count
    return len(talks)

"""The measuring loop: hold the sessions of a plan with an engine, one request at a time.

Sessions are interleaved by turn, as an agent server sees them: turn 1 of every session, then turn 2
of every session, and so on. With a budget too small for all of them, what was evicted since a
session's last turn has to be computed again, and its time to first token shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile

from kvtier.bench.engine import Answer, Engine, EngineFactory
from kvtier.bench.metrics import is_resident, summarize, turn_results
from kvtier.bench.schema import Occupancy, Plan, RequestRecord, RunResult, Workload
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
    """Run one policy from start to end."""
    workload = plan.workload
    assert isinstance(workload, Workload), "another kind of workload is another module's"
    script = open_script(workload.script, plan.engine_args["model_path"])
    sessions = plan_sessions(workload, script)
    with warm_engine(plan, open_engine, script, emit) as (engine, load_s):
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


@contextmanager
def warm_engine(
    plan: Plan, open_engine: EngineFactory, script: Script, emit: Emit
) -> Iterator[tuple[Engine, float]]:
    """A plan's engine and the seconds that loading it took; it is closed whatever happens. One-off
    costs (thread pools, kernel compilation) are paid before anything is timed."""
    emit({"event": "loading"})
    began = time.perf_counter()
    engine, filler = open_engine(plan), script.warm_up_ids
    try:
        for length in (len(filler) // 2, len(filler)):
            engine.generate(filler[:length], 3, script.stop_ids)
        engine.flush()
        load_s = time.perf_counter() - began
        emit({"event": "ready", "load_s": load_s})
        yield engine, load_s
    finally:
        engine.close()


def hold_sessions(
    engine: Engine, talks: Sequence[Conversation], turns: int, emit: Emit
) -> list[Asked]:
    """Every request of the workload, in the order served."""
    everything = []
    for turn in range(turns):
        for talk in talks:
            emit({"event": "turn", "session": talk.index, "turn": turn + 1})
            for asked in _hold_turn(engine, talk, turn):
                everything.append(asked)
                shown = asked.record.model_dump(exclude={"output_ids"})
                emit({"event": "request", **shown})
    return everything


def _hold_turn(engine: Engine, talk: Conversation, turn: int) -> list[Asked]:
    asked = talk.planned.turns[turn]
    engine.occupancy()  # starts the peak of this turn
    answer = _ask(engine, talk, asked)
    everything = [_asked(talk, turn, 0, asked, answer, settled(engine))]
    talk.take_answer(asked.prompt_ids, answer.output_ids)
    for number, question in enumerate(talk.planned.branches[turn], start=1):
        answer = _ask(engine, talk, question)
        everything.append(_asked(talk, turn, number, question, answer))
    return everything


def settled(engine: Engine) -> Occupancy:
    """Wait until a turn's KV has reached the tier, and return what the pool holds then: people and
    tools take longer than that between turns. The first reading has the peak."""
    first = last = engine.occupancy()
    deadline = time.monotonic() + TIER_PATIENCE_S
    while last.tier is not None and last.tier.pending and time.monotonic() < deadline:
        time.sleep(0.01)
        last = engine.occupancy()
    return first.model_copy(update={"tier": last.tier})


def _ask(engine: Engine, talk: Conversation, asked: Turn) -> Answer:
    script = talk.script
    return engine.generate([*talk.history, *asked.prompt_ids], script.max_answer, script.stop_ids)


def _asked(
    talk: Conversation,
    turn: int,
    question: int,
    asked: Turn,
    answer: Answer,
    occupancy: Occupancy | None = None,
) -> Asked:
    """A request's outcome, judged by what could be known before it was asked."""
    right = asked.expected(talk.answers)
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
        recall=None if right is None else talk.script.judge(right, answer.output_ids),
        occupancy=occupancy,
    )
    return Asked(record, prompt_ids, right)


def score(engine: Engine, asked: Asked, unscored: int) -> Asked:
    """Return the answer with the NLL of the right one, where RunResult says that there is one."""
    record, right = asked.record, asked.right
    before_anything_is_dropped = record.turn == 1 and record.question == 0
    if right is None or len(right) <= unscored or before_anything_is_dropped:
        return asked
    nll, cached = answer_nll(engine, asked.prompt_ids, right, unscored)
    if cached < record.history_tokens:
        return asked
    return replace(asked, record=record.model_copy(update={"nll": nll}))


def answer_nll(
    engine: Engine, prompt_ids: Sequence[int], answer_ids: Sequence[int], unscored: int
) -> tuple[float, int]:
    """Return the mean negative log-likelihood of the answer's tokens but the first `unscored`, in
    nats per token, each given the right ones before it, under the policy that serves; and how many
    of the prompt's tokens were cached, at least. answer_ids: more than `unscored`

    Asking for log-probabilities of a prompt would have the prompt computed exactly, whatever the
    policy keeps of it. So the right answer is never in the prompt that is asked about: the engine
    generates greedily and says, place by place, how likely the right token was. That holds up to
    the first place where it says something else; the next request goes on behind the right token.

        right answer    4  8  2  1  3
        request 1       4  8  7  …         counts for places 1, 2, 3
        request 2       4  8  2 │ 1  3     counts for places 4, 5
    """
    logprobs: list[float] = []
    cached = len(prompt_ids)
    while len(logprobs) < len(answer_ids):
        at = len(logprobs)
        wanted = answer_ids[at:]
        scored = engine.score([*prompt_ids, *answer_ids[:at]], wanted)
        pairs = zip(scored.output_ids, wanted, strict=True)
        agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        logprobs += scored.logprobs[: agreed + 1]
        cached = min(cached, scored.cached_tokens)
    counted = logprobs[unscored:]
    return -sum(counted) / len(counted), cached


def count_resident(engine: Engine, talks: Sequence[Conversation]) -> int:
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

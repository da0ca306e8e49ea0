"""Replaying a trace: every request is sent at its time, whatever became of those before it, or, in
a trace of sessions, so long after the answer before it as it was recorded. It generates as many
tokens as it did."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvtier.bench.engine import Answer, Arrival, ReplayEngine
from kvtier.bench.measure import Emit, settled, warm_up
from kvtier.bench.metrics import is_resident
from kvtier.bench.recorded.options import open_trace
from kvtier.bench.recorded.prompts import Prompts
from kvtier.bench.replay.metrics import summarize
from kvtier.bench.replay.schema import ReplayRecord, ReplayResult
from kvtier.bench.schema import Plan, Replay
from kvtier.bench.workload import open_script
from kvtier.traffic.continuations import sessions_of

# Conversations that are gone, one after the other in the order of use, before it is believed that
# all older ones are gone as well.
MISSES_IN_A_ROW = 8

ReplayEngineFactory = Callable[[Plan], ReplayEngine]


def replay_plan(plan: Plan, open_engine: ReplayEngineFactory, emit: Emit) -> ReplayResult:
    """Run one policy from start to end; the engine is closed whatever happens."""
    replay = plan.workload
    assert isinstance(replay, Replay), "another kind of workload is another module's"
    emit({"event": "loading"})
    script = open_script(replay.script, plan.engine_args["model_path"])
    trace = open_trace(replay)
    prompts = Prompts(trace, script.warm_up_ids, replay.seed)
    arrivals = [
        Arrival(
            request.arrival_s if before is None else request.delay_s or 0.0,
            tuple(prompts.ids(index)),
            request.output_tokens,
            after=before,
        )
        for index, (request, before) in enumerate(zip(trace.requests, trace.before(), strict=True))
    ]
    began = time.perf_counter()
    engine = open_engine(plan)
    try:
        warm_up(engine, script.warm_up_ids, script.stop_ids)
        load_s = time.perf_counter() - began
        emit({"event": "ready", "load_s": load_s})
        before = engine.occupancy()
        told = _teller(emit, len(arrivals))
        began = time.perf_counter()
        answers = engine.replay(arrivals, told)
        wall_s = time.perf_counter() - began
        after = settled(engine)
        talks = sessions_of(trace)
        resident = find_resident(engine, arrivals, answers, talks, script.stop_ids)
    finally:
        engine.close()
    records = tuple(
        _record(index, talks[index], one, answer)
        for index, (one, answer) in enumerate(zip(arrivals, answers, strict=True))
    )
    after = after.model_copy(
        update={"evicted_tokens": after.evicted_tokens - before.evicted_tokens}
    )
    return ReplayResult(
        policy=plan.policy,
        ca_share=plan.ca_share,
        heads_compete=plan.heads_compete,
        pools=plan.pools,
        kv_capacity_bytes=before.kv_capacity_bytes,
        load_s=load_s,
        wall_s=wall_s,
        device=engine.device,
        tier=after.tier,
        chunk_tokens=plan.engine_args["chunked_prefill_size"],
        max_running=plan.engine_args["max_running_requests"],
        summary=summarize(records, replay, wall_s, after, len(resident)),
        resident=tuple(resident),
        requests=records,
    )


def _teller(emit: Emit, total: int) -> Callable[[int, Answer], None]:
    done = 0

    def tell(index: int, answer: Answer) -> None:
        nonlocal done
        done += 1
        emit({"event": "replayed", "done": done, "of": total, "ttft_ms": answer.ttft_ms})

    return tell


def _record(index: int, conversation: int, sent: Arrival, answer: Answer) -> ReplayRecord:
    return ReplayRecord(
        index=index,
        conversation=conversation,
        arrival_s=answer.sent_s,
        prompt_tokens=len(sent.input_ids),
        cached_tokens=answer.cached_tokens,
        restored_tokens=answer.restored_tokens,
        output_tokens=len(answer.output_ids),
        ttft_ms=answer.ttft_ms,
        latency_ms=answer.latency_ms,
    )


def find_resident(
    engine: ReplayEngine,
    arrivals: Sequence[Arrival],
    answers: Sequence[Answer],
    talks: Sequence[int],
    stop_ids: Sequence[int],
) -> list[int]:
    """Conversations whose last prompt is still on the device, by asking for one more token of each;
    the numbers of those prompts.

    From the most recently answered back: a hit evicts next to nothing, and a miss evicts what was
    used longest ago, which would be asked for last. What the tier restores was not resident.
    """
    last = dict(zip(talks, range(len(talks)), strict=True))
    ended_s = {i: answers[i].sent_s + answers[i].latency_ms / 1e3 for i in last.values()}
    found: list[int] = []
    misses = 0
    for index in sorted(last.values(), key=lambda i: ended_s[i], reverse=True):
        prompt = arrivals[index].input_ids
        answer = engine.generate(prompt, 1, stop_ids)
        if is_resident(answer.cached_tokens - answer.restored_tokens, len(prompt)):
            found.append(index)
            misses = 0
        else:
            misses += 1
        if misses == MISSES_IN_A_ROW:
            break
    return found


__all__ = ["replay_plan"]

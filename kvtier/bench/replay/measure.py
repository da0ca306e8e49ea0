"""Replaying a trace: every request is sent at its time, whatever became of those before it, or, in
a trace of sessions, so long after the answer before it as it was recorded. It generates as many
tokens as it did."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from itertools import count

import numpy as np

from kvtier.bench.engine import Answer, Arrival, Engine, EngineFactory
from kvtier.bench.measure import Emit, settled, warm_engine
from kvtier.bench.metrics import is_resident
from kvtier.bench.recorded import open_trace
from kvtier.bench.replay.schema import Percentiles, ReplayRecord, ReplayResult, ReplaySummary
from kvtier.bench.schema import Occupancy, Plan, Replay
from kvtier.bench.workload import open_script
from kvtier.traffic.continuations import find_continuations, sessions_of
from kvtier.traffic.trace import Trace

# Conversations that are gone, one after the other in the order of use, before it is believed that
# all older ones are gone as well.
MISSES_IN_A_ROW = 8

CACHED_BLOCKS = 4096


class Prompts:
    """The prompts of a trace. words: token ids to draw from, in any order.

    Every id of a block stands for tokens that are drawn from the seed and the id alone, so equal
    ids are equal tokens, in any order and on any machine. The partly filled block at a prompt's end
    is the beginning of the block of the request that continues it
    (`kvtier.traffic.continuations`): as in a real conversation, the next turn repeats the whole
    prompt. What it does not repeat is the answer, which the trace does not have.
    """

    def __init__(self, trace: Trace, words: Sequence[int], seed: int) -> None:
        self.trace = trace
        self.links = find_continuations(trace)
        self._words = np.unique(np.asarray(words, np.int64))
        self._seed = seed
        self._block = lru_cache(CACHED_BLOCKS)(self._draw)

    def ids(self, index: int) -> list[int]:
        """Token ids of a request's prompt."""
        request = self.trace.requests[index]
        blocks = [self._block(one) for one in self.links.blocks(request)]
        return [token for block in blocks for token in block][: request.input_tokens]

    def _draw(self, block_id: int) -> list[int]:
        rng = np.random.default_rng([self._seed, block_id])
        drawn: list[int] = rng.choice(self._words, self.trace.block_tokens).tolist()
        return drawn


def replay_plan(plan: Plan, open_engine: EngineFactory, emit: Emit) -> ReplayResult:
    """Run one policy from start to end."""
    replay = plan.workload
    assert isinstance(replay, Replay), "another kind of workload is another module's"
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
    done = count(1)

    def tell(index: int, answer: Answer) -> None:
        ttft_ms = answer.ttft_ms
        emit({"event": "replayed", "done": next(done), "of": len(arrivals), "ttft_ms": ttft_ms})

    with warm_engine(plan, open_engine, script, emit) as (engine, load_s):
        before = engine.occupancy()
        began = time.perf_counter()
        answers = engine.replay(arrivals, tell)
        wall_s = time.perf_counter() - began
        after = settled(engine)
        talks = sessions_of(trace)
        resident = find_resident(engine, arrivals, answers, talks, script.stop_ids)
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
    engine: Engine,
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


def meets(record: ReplayRecord, replay: Replay) -> bool:
    """Return whether a request was served as the SLO wants it."""
    tpot = record.tpot_ms
    return record.ttft_ms <= replay.slo_ttft_ms and (tpot is None or tpot <= replay.slo_tpot_ms)


def summarize(
    records: Sequence[ReplayRecord],
    replay: Replay,
    wall_s: float,
    after: Occupancy,
    resident: int,
) -> ReplaySummary:
    """Summarize all requests. after: the pool when the last one had been answered."""
    prompts = sum(record.prompt_tokens for record in records)
    restored = sum(record.restored_tokens for record in records)
    good = sum(meets(record, replay) for record in records)
    return ReplaySummary(
        hit_rate=sum(record.cached_tokens for record in records) / prompts,
        tier_hit_rate=restored / prompts,
        ttft_ms=Percentiles.of([record.ttft_ms for record in records]),
        tpot_ms=Percentiles.of([t for record in records if (t := record.tpot_ms) is not None]),
        goodput_share=good / len(records),
        goodput_per_s=good / wall_s,
        output_tokens_per_s=sum(record.output_tokens for record in records) / wall_s,
        kv_peak_bytes=after.kv_peak_bytes,
        evicted_tokens=after.evicted_tokens,
        restored_tokens=restored,
        resident=resident,
    )

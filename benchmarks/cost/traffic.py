"""Requests one after the other, in an engine of their own: what is computed, how fast the first
token comes, and what KV rests.

What is computed is a prompt less what came from the cache. Nothing here depends on what is
answered.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from benchmarks.common.benchmark import Arguments, Options
from benchmarks.common.engines import bench_plan
from benchmarks.common.remote import clean_environment, run_job
from kvtier.bench.engine import Arrival, SglangEngine
from kvtier.bench.measure import settled
from kvtier.bench.schema import Plan
from kvtier.bench.worker import die_with_parent

ANSWER_TOKENS = 16
CHUNK_TOKENS = 1024
IDS = (6, 384)
Some = Callable[[int], tuple[int, ...]]
Prompt = tuple[int | tuple[int, ...], ...]
"""The parts of a prompt in order: tokens, or the answer to the request of that number."""


class Traffic(BaseModel):
    """Requests, one after the other."""

    model_config = ConfigDict(frozen=True)

    name: str
    prompts: tuple[Prompt, ...]


class Cost(BaseModel):
    """computed: tokens of all prompts; kv_bytes: that rest at the end; ttft_ms: mean time to the
    first token, of all requests but the first."""

    model_config = ConfigDict(frozen=True)

    name: str
    computed: int
    kv_bytes: int
    ttft_ms: float = 0.0


class Job(BaseModel):
    """The job of a worker."""

    plan: Plan
    traffic: tuple[Traffic, ...]


def declare(arguments: Arguments) -> None:
    """A model with what was fitted to it."""
    arguments.model()
    arguments.add(
        "--scorer-file", type=Path, required=True, metavar="FILE",
        help="what `kvtier calibrate tokens` fitted to the model",
    )  # fmt: skip


def serve(
    policy: str,
    options: Options,
    traffic: Sequence[Traffic],
    settings: Mapping[str, str] | None = None,
) -> list[Cost]:
    """All traffic under a policy of the bench. settings: environment variables beside its own."""
    prompts = [prompt for one in traffic for prompt in one.prompts]
    flags = {
        "--workload": "recall", "--policies": policy, "--turns": "1", "--questions": "1",
        "--len": str(max(len(plain(prompt)) for prompt in prompts)), "--sessions": "4",
        "--budget-sessions": "4", "--chunk": str(CHUNK_TOKENS),
        "--model-path": str(options.model_path), "--scorer-file": str(options.scorer_file),
    }  # fmt: skip
    plan = bench_plan(flags)
    environment = clean_environment() | plan.environment | dict(settings or {})
    job = Job(plan=plan, traffic=tuple(traffic))
    found = run_job("benchmarks.cost.traffic", job, environment)
    return [Cost.model_validate(one) for one in found]


def drawing(seed: int) -> Some:
    """Return what draws so many random tokens."""
    chance = random.Random(seed)
    return lambda tokens: tuple(chance.randrange(*IDS) for _ in range(tokens))


def results(
    some: Some, system: int, turns: int, result: int, note: tuple[int, ...] | None
) -> tuple[Prompt, ...]:
    """Turns of a question and so many tokens that only their own prompt has, behind a system
    prompt. note: in their place later; None: ten tokens, each time others."""
    prompts: list[Prompt] = []
    past: Prompt = (some(system),)
    for turn in range(turns):
        question = some(150)
        prompts.append((*past, question, some(result)))
        past = (*past, question, some(10) if note is None else note, turn)
    return tuple(prompts)


def plain(prompt: Prompt, answers: Sequence[Sequence[int]] = ()) -> list[int]:
    """A prompt's tokens; without the answers as many of others."""
    parts: list[Any] = []
    for part in prompt:
        if isinstance(part, int):
            parts += answers[part] if answers else [0] * ANSWER_TOKENS
        else:
            parts += part
    return parts


def worker(job: Job) -> list[Cost]:
    engine = SglangEngine(job.plan.engine_args)
    try:
        return [cost_of(engine, traffic) for traffic in job.traffic]
    finally:
        engine.close()


def cost_of(engine: SglangEngine, traffic: Traffic) -> Cost:
    """The requests in an empty cache."""
    engine.flush()
    empty = settled(engine).kv_used_bytes
    answers: list[Sequence[int]] = []
    computed, waited = 0, list[float]()
    for prompt in traffic.prompts:
        ids = plain(prompt, answers)
        arrival = Arrival(0.0, tuple(ids), ANSWER_TOKENS)
        (answer,) = engine.replay([arrival], lambda number, answer: None)
        # Compressed before the next one comes.
        settled(engine)
        computed += len(ids) - answer.cached_tokens
        waited.append(answer.ttft_ms)
        answers.append(answer.output_ids)
    return Cost(
        name=traffic.name,
        computed=computed,
        kv_bytes=settled(engine).kv_used_bytes - empty,
        ttft_ms=statistics.fmean(waited[1:] or waited),
    )


if __name__ == "__main__":
    die_with_parent()
    done = worker(Job.model_validate_json(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps([cost.model_dump() for cost in done]))

"""Forks of one long context in the real engine, one engine process per arm.

    python -m benchmarks.tier.forks_engine PLAN.json FORKS.json ANSWERS.json

An arm has the context when a fork comes, or nothing, and forgets everything before the next one
unless it drops nothing anyway:

    whole     [ context ]   [ prefix | question ]                           [ prefix | question ] …
    tiered    [ context ]   [ prefix | question ]    flush    [ context ]   [ prefix | question ] …
    cold                    [ prefix | question ]    flush                  [ prefix | question ] …

The tiered arm computes its context once: afterwards it comes back as it was, compressed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kvtier.bench.engine import ChatEngine, SglangEngine
from kvtier.bench.measure import settled, warm_up
from kvtier.bench.schema import Plan
from kvtier.bench.worker import die_with_parent
from kvtier.synthetic.recall_script import RecallScript


class Fork(BaseModel):
    """The context's first `place` tokens, a question that follows them, and its right answer."""

    model_config = ConfigDict(frozen=True)

    place: int
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


class Job(BaseModel):
    """The job of an arm. held: it has the context when a fork comes; forgets: everything before
    each fork."""

    model_config = ConfigDict(frozen=True)

    context_ids: tuple[int, ...]
    forks: tuple[Fork, ...]
    held: bool
    forgets: bool


class ForkAnswer(BaseModel):
    """cached_tokens: from the device or the tier; ttft_ms: waiting for the tier included."""

    model_config = ConfigDict(frozen=True)

    output_ids: tuple[int, ...]
    cached_tokens: int
    ttft_ms: float


class Served(BaseModel):
    """One arm. kv_bytes: on the device before each fork; where everything else was forgotten, of
    the resting context."""

    model_config = ConfigDict(frozen=True)

    answers: tuple[ForkAnswer, ...]
    kv_bytes: tuple[int, ...]


def serve(engine: ChatEngine, job: Job) -> Served:
    """Every fork, one after the other; each has left for the tier before the next one comes."""
    script = RecallScript()
    warm_up(engine, script.warm_up_ids, script.stop_ids)
    empty = engine.occupancy().kv_used_bytes
    answers, kv_bytes = [], []
    for fork in job.forks:
        if job.forgets:
            engine.flush()
        if job.held:
            engine.generate(job.context_ids, 1, script.stop_ids)
        kv_bytes.append(settled(engine).kv_used_bytes - empty)
        prompt = [*job.context_ids[: fork.place], *fork.prompt_ids]
        answer = engine.generate(prompt, script.max_answer, script.stop_ids)
        answers.append(
            ForkAnswer(
                output_ids=answer.output_ids,
                cached_tokens=answer.cached_tokens,
                ttft_ms=answer.ttft_ms,
            )
        )
        settled(engine)
    return Served(answers=tuple(answers), kv_bytes=tuple(kv_bytes))


def main(argv: Sequence[str]) -> int:
    """The worker: plan and forks in, answers out."""
    die_with_parent()
    plan = Plan.model_validate_json(Path(argv[0]).read_text())
    engine = SglangEngine(plan)
    try:
        served = serve(engine, Job.model_validate(json.loads(Path(argv[1]).read_text())))
    finally:
        engine.close()
    Path(argv[2]).write_text(served.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

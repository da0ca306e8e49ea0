"""What branches of agents' sessions cost: tokens that are computed, and KV that rests.

    python -m benchmarks.cost.branches --scorer-file out/kvtier-demo/token_worth.npz

    users      eight users over one prompt of 4,000 tokens, each with 700 tokens of their own
    elided     one session of eight turns; a tool's result is whole in its own turn, and a note in
               all later ones, so that every prompt leaves the one before where that result began
    sessions   a hundred sessions over one prompt of 15,000 tokens, each with 200 of their own

The same requests, one after the other, in SGLang's own cache and in kvtier's, where heads compete
for a quarter of the entries. There is no tier. What is computed is a prompt less what came from the
cache; tokens are random, and nothing here depends on what is answered.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from benchmarks.common.bars import Bar
from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.recall_arguments import add_model
from benchmarks.common.recall_engine import bench_plan
from benchmarks.common.remote import clean_environment, run_module
from benchmarks.common.table import new_table, show
from kvtier.bench.engine import Arrival, SglangEngine
from kvtier.bench.measure import settled
from kvtier.bench.schema import Plan
from kvtier.bench.worker import die_with_parent
from kvtier.sizes import format_bytes

ARMS = ("full", "kvtier")
IDS = (6, 384)
ANSWER_TOKENS = 16
CHUNK_TOKENS = 1024
# Of every prompt what a branch may compute beside what SGLang does: the widest window.
WINDOW_TOKENS = 256
Prompt = tuple[int | tuple[int, ...], ...]
"""What follows each other: tokens, or the answer to the request of that number."""


class Traffic(BaseModel):
    """Requests, one after the other."""

    model_config = ConfigDict(frozen=True)

    name: str
    prompts: tuple[Prompt, ...]


class Cost(BaseModel):
    """computed: tokens of all prompts; kv_bytes: that rest at the end."""

    model_config = ConfigDict(frozen=True)

    name: str
    computed: int
    kv_bytes: int


class Job(BaseModel):
    """What a worker does."""

    plan: Plan
    traffic: tuple[Traffic, ...]


def declare(arguments: Arguments) -> None:
    add_model(arguments)
    arguments.add(
        "--scorer-file", type=Path, required=True, metavar="FILE",
        help="what `kvtier calibrate tokens` fitted to the model",
    )  # fmt: skip
    arguments.number("--scale", 1.0, "of all numbers of tokens, such as .1 for a try", most=1)


def all_traffic(seed: int, scale: float) -> tuple[Traffic, ...]:
    """The three of the module docstring."""
    chance = random.Random(seed)

    def some(tokens: int) -> tuple[int, ...]:
        return tuple(chance.randrange(*IDS) for _ in range(round(scale * tokens)))

    return (
        Traffic(name="users", prompts=shared_prompt(some, 4000, 8, 700)),
        Traffic(name="elided", prompts=elided_results(some, 8)),
        Traffic(name="sessions", prompts=shared_prompt(some, 15_000, 100, 200)),
    )


def shared_prompt(
    some: Callable[[int], tuple[int, ...]], shared: int, users: int, own: int
) -> tuple[Prompt, ...]:
    prompt = some(shared)
    return tuple((prompt, some(own)) for _ in range(users))


def elided_results(some: Callable[[int], tuple[int, ...]], turns: int) -> tuple[Prompt, ...]:
    """Turns of a question, a tool's result and an answer, after a system prompt."""
    prompts: list[Prompt] = []
    past: Prompt = (some(2000),)
    for turn in range(turns):
        question = some(150)
        prompts.append((*past, question, some(600)))
        past = (*past, question, some(10), turn)
    return tuple(prompts)


def run(options: Options) -> Measured:
    traffic = all_traffic(options.seed, options.scale)
    found = {arm: serve(arm, options, traffic) for arm in ARMS}
    costs = list(zip(*(found[arm] for arm in ARMS), strict=True))
    table = new_table("what branches cost", ("", "computed", "full KV", "KV", "full KV"))
    for full, ours in costs:
        kv = (format_bytes(ours.kv_bytes), format_bytes(full.kv_bytes))
        table.add_row(ours.name, f"{ours.computed:,}", f"{full.computed:,}", *kv)
    show(table)
    figures = {
        "model": options.model_path.name,
        "scale": options.scale,
        **{arm: [cost.model_dump() for cost in found[arm]] for arm in ARMS},
    }
    return Measured(figures, judged(costs, traffic))


def judged(costs: Sequence[tuple[Cost, Cost]], traffic: Sequence[Traffic]) -> list[Bar]:
    (full, ours), (elided_full, elided), (sessions_full, sessions) = costs
    users = len(traffic[0].prompts)
    more, share = ours.computed - full.computed, ours.kv_bytes / full.kv_bytes
    elided_ratio = elided.computed / elided_full.computed
    copies = sessions.kv_bytes / sessions_full.kv_bytes
    most = users * WINDOW_TOKENS
    return [
        Bar(f"users: computed beside SGLang's, at most {most:,}", f"{more:,}", more <= most),
        Bar("users: KV of SGLang's, at most .33", f"{share:.2f}", share <= 0.33),
        Bar("elided: computed, times SGLang's, at most 1.15", f"{elided_ratio:.2f}",
            elided_ratio <= 1.15),
        Bar("sessions: KV of SGLang's, which holds one copy, at most .33", f"{copies:.2f}",
            copies <= 0.33),
    ]  # fmt: skip


def serve(arm: str, options: Options, traffic: Sequence[Traffic]) -> list[Cost]:
    """All traffic in an engine of its own."""
    longest = max(len(prompt) for prompt in map(_plain, _prompts(traffic)))
    flags = {
        "--workload": "recall", "--policies": arm, "--turns": "1", "--questions": "1",
        "--len": str(longest), "--sessions": "4", "--budget-sessions": "4",
        "--chunk": str(CHUNK_TOKENS), "--model-path": str(options.model_path),
        "--scorer-file": str(options.scorer_file),
    }  # fmt: skip
    plan = bench_plan(flags)
    with tempfile.TemporaryDirectory(prefix="kvtier-branches-") as name:
        job, costs = Path(name, "job.json"), Path(name, "costs.json")
        job.write_text(Job(plan=plan, traffic=tuple(traffic)).model_dump_json())
        environment = clean_environment() | plan.environment
        run_module("benchmarks.cost.branches", [job, costs], environment, Path(name, "log"))
        return [Cost.model_validate(one) for one in json.loads(costs.read_text())]


def _prompts(traffic: Sequence[Traffic]) -> list[Prompt]:
    return [prompt for one in traffic for prompt in one.prompts]


def _plain(prompt: Prompt, answers: Sequence[Sequence[int]] = ()) -> list[int]:
    """A prompt's tokens; without the answers as many of others."""
    parts: list[Any] = []
    for part in prompt:
        if isinstance(part, int):
            parts += answers[part] if answers else [0] * ANSWER_TOKENS
        else:
            parts += part
    return parts


def worker(job: Job) -> list[Cost]:
    engine = SglangEngine(job.plan)
    try:
        return [cost_of(engine, traffic) for traffic in job.traffic]
    finally:
        engine.close()


def cost_of(engine: SglangEngine, traffic: Traffic) -> Cost:
    """The requests in an empty cache."""
    engine.flush()
    empty = settled(engine).kv_used_bytes
    answers: list[Sequence[int]] = []
    computed = 0
    for prompt in traffic.prompts:
        ids = _plain(prompt, answers)
        arrival = Arrival(0.0, tuple(ids), ANSWER_TOKENS)
        (answer,) = engine.replay([arrival], lambda number, answer: None)
        # Compressed before the next one comes.
        settled(engine)
        computed += len(ids) - answer.cached_tokens
        answers.append(answer.output_ids)
    kv_bytes = settled(engine).kv_used_bytes - empty
    return Cost(name=traffic.name, computed=computed, kv_bytes=kv_bytes)


BENCHMARK = Benchmark(
    "cost.branches",
    __doc__,
    declare,
    run,
    out=RESULTS / "branches.json",
    seeded="of all tokens",
)
main = BENCHMARK.main

if __name__ == "__main__":
    if len(sys.argv) == 3 and not sys.argv[1].startswith("--"):
        die_with_parent()
        done = worker(Job.model_validate_json(Path(sys.argv[1]).read_text()))
        Path(sys.argv[2]).write_text(json.dumps([cost.model_dump() for cost in done]))
        sys.exit(0)
    sys.exit(main())

"""Forks in the middle of a compressed context: exact again, from the tier, and how fast.

    python -m benchmarks.tier.forks --len 32k --retention 0.25

One context is compressed in an engine with a tier. Then requests leave it at random tokens, each
with a question of its own about what stands before: they need the exact KV of a prefix that the
device no longer has. The same forks are served by an engine that never drops anything (whose
tokens are the right ones) and, each from nothing, by one without a tier (whose time is what the
tier has to beat). Facts stand among look-alikes, so that a share of the context is not enough.

    equal        the greedy tokens are those of the engine that never dropped anything; "both err"
                 where those are not the right answer
    restored     time to first token of a fork, its exact prefix coming from the tier
    recomputed   of the same fork where nothing is left of the context and there is no tier

Every fork finds the compressed context and nothing else: one that began inside another fork's turn
would share that turn, compressed as it is. For the same reason none begins in the context's own
recent window.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from benchmarks.common.bars import Bar
from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.recall_arguments import add_model
from benchmarks.common.recall_contexts import LOOK_ALIKES, RecallContext, make_context
from benchmarks.common.recall_engine import PROFILE_FILE, bench_plan, worker_environment
from benchmarks.common.remote import run_module
from benchmarks.common.table import new_table, show
from benchmarks.tier.forks_engine import Fork, Job, Served
from kvtier.bench.runner import LOCAL_TIER, TIER_VARIABLE, local_tier
from kvtier.bench.schema import Plan
from kvtier.config import Settings
from kvtier.errors import UsageError
from kvtier.retention.rules import locality_rule
from kvtier.synthetic.recall import score_answer

QUESTIONS = 64
# A fork has this much of the context in front of it, and a few facts to be asked about.
LEAST_SHARE = 1 / 16
# Room on the device, in contexts: the one that rests, a fork, and as much again.
ROOM_CONTEXTS = 3


class Row(BaseModel):
    """One fork. right: whether the whole cache gives the right answer; cached: tokens that the
    arm with the tier did not compute."""

    model_config = ConfigDict(frozen=True)

    place: int
    equal: bool
    right: bool
    cached: int
    held_ms: float
    restored_ms: float
    recomputed_ms: float
    recomputed_equal: bool


def declare(arguments: Arguments) -> None:
    add_model(arguments, "head_profile.json")
    arguments.size("--len", "32k", "context tokens")
    arguments.whole("--forks", 20, "random places")
    arguments.number("--retention", 0.25, "share that CA heads keep", most=1, metavar="SHARE")


def run(options: Options) -> Measured:
    """Serve the forks in every way."""
    tokens = options.len
    context = make_context(LOOK_ALIKES, options.seed, 0, tokens, min(QUESTIONS, tokens // 64))
    forks = choose_forks(context, options.forks, options.seed)
    share = {"RETENTION": str(options.retention)}
    arm = (options.model_path, context, forks)
    whole = serve("full", *arm, {}, held=True, forgets=False)
    tiered = serve("kvtier", *arm, share | {"TIER": LOCAL_TIER}, held=True, forgets=True)
    cold = serve("kvtier", *arm, share, held=False, forgets=True)
    rows = make_rows(forks, whole, tiered, cold)
    show(make_table(rows))
    settings = {
        "model": options.model_path.name,
        "context_tokens": tokens,
        "context_kind": LOOK_ALIKES,
        "retention": options.retention,
        "seed": options.seed,
    }
    figures = {
        "settings": settings,
        "context_bytes": {"full": whole.kv_bytes[0], "kvtier": sorted(set(tiered.kv_bytes))},
        "forks": [row.model_dump() for row in rows],
    }
    return Measured(figures, make_bars(rows))


def choose_forks(context: RecallContext, count: int, seed: int) -> list[Fork]:
    """Random places, each with a question about a random fact that stands before it."""
    chance = random.Random(seed)
    ids = context.context_ids
    ends = {question: _find(ids, question.answer_ids) + len(question.answer_ids)
            for question in context.questions}  # fmt: skip
    least = max(int(len(ids) * LEAST_SHARE), min(ends.values()))
    places = range(least, len(ids) - locality_rule(Settings()).recent_tokens)
    if len(places) < count:
        raise UsageError("--len", f"a context with {count} places in its middle", len(ids))
    forks = []
    for place in chance.sample(places, count):
        known = [question for question, end in ends.items() if end <= place]
        asked = chance.choice(known)
        forks.append(Fork(place=place, prompt_ids=asked.prompt_ids, answer_ids=asked.answer_ids))
    return forks


def _find(ids: Sequence[int], part: Sequence[int]) -> int:
    """Return where `part` stands in `ids`."""
    width, wanted = len(part), tuple(part)
    return next(i for i in range(len(ids)) if tuple(ids[i : i + width]) == wanted)


def serve(
    policy: str,
    model: Path,
    context: RecallContext,
    forks: Sequence[Fork],
    settings: Mapping[str, str],
    *,
    held: bool,
    forgets: bool,
) -> Served:
    """One arm in an engine of its own, with a tier of its own where the settings want one."""
    ids = context.context_ids
    job = Job(context_ids=ids, forks=tuple(forks), held=held, forgets=forgets)
    with tempfile.TemporaryDirectory(prefix="kvtier-forks-") as name:
        folder = Path(name)
        plan = make_plan(policy, model, len(ids))
        (folder / PROFILE_FILE).write_bytes((model / PROFILE_FILE).read_bytes())
        (folder / "plan.json").write_text(plan.model_dump_json())
        (folder / "forks.json").write_text(job.model_dump_json())
        environment = worker_environment(folder, plan, settings)
        files = [folder / name for name in ("plan.json", "forks.json", "answers.json")]
        with local_tier(environment, folder / "tier.log") as tier:
            address = {TIER_VARIABLE: tier[TIER_VARIABLE]} if tier else {}
            log = folder / "worker.log"
            run_module("benchmarks.tier.forks_engine", files, environment | address, log)
        return Served.model_validate_json(files[-1].read_text())


def make_plan(policy: str, model: Path, tokens: int) -> Plan:
    """A plan of the bench with the same bytes for every arm."""
    flags = {
        "--workload": "recall",
        "--policies": policy,
        "--turns": "1",
        "--questions": "1",
        "--len": str(tokens),
        "--sessions": str(ROOM_CONTEXTS),
        "--budget-sessions": str(ROOM_CONTEXTS),
        "--model-path": str(model),
        "--head-profile": str(model / PROFILE_FILE),
    }
    return bench_plan(flags)


def make_rows(forks: Sequence[Fork], whole: Served, tiered: Served, cold: Served) -> list[Row]:
    """A row per fork. whole, tiered, cold: the same forks in the same order."""
    rows = []
    arms = (whole.answers, tiered.answers, cold.answers)
    for fork, exact, restored, computed in zip(forks, *arms, strict=True):
        rows.append(
            Row(
                place=fork.place,
                equal=restored.output_ids == exact.output_ids,
                right=score_answer(fork.answer_ids, exact.output_ids).codes == 1,
                cached=restored.cached_tokens,
                held_ms=exact.ttft_ms,
                restored_ms=restored.ttft_ms,
                recomputed_ms=computed.ttft_ms,
                recomputed_equal=computed.output_ids == exact.output_ids,
            )
        )
    return rows


def make_bars(rows: Sequence[Row]) -> list[Bar]:
    """Return what has to hold, and whether it does."""
    equal = sum(row.equal for row in rows)
    below = sum(row.restored_ms < row.recomputed_ms for row in rows)
    restored = statistics.median(row.restored_ms for row in rows)
    recomputed = statistics.median(row.recomputed_ms for row in rows)
    return [
        Bar(
            "forks whose tokens are those of the whole cache",
            f"{equal} of {len(rows)}",
            equal == len(rows),
        ),
        Bar(
            "median TTFT below recomputing",
            f"{restored:.0f} ms against {recomputed:.0f} ms",
            restored < recomputed,
        ),
        Bar(
            "forks whose TTFT is below recomputing",
            f"{below} of {len(rows)}",
            below == len(rows),
        ),
    ]


def make_table(rows: Sequence[Row]) -> Table:
    """A line per fork."""
    columns = ("fork at", "not computed", "tokens", "restored", "recomputed", "", "held")
    table = new_table("Forks of a compressed context", columns, left=())
    for row in rows:
        table.add_row(
            f"{row.place}", f"{row.cached}",
            ("equal" if row.equal else "DIFFERENT") + ("" if row.right else ", both err"),
            f"{row.restored_ms:.0f} ms", f"{row.recomputed_ms:.0f} ms",
            f"{row.recomputed_ms / row.restored_ms:.1f}x less", f"{row.held_ms:.0f} ms",
        )  # fmt: skip
    return table


BENCHMARK = Benchmark(
    "tier.forks",
    __doc__,
    declare,
    run,
    out=RESULTS / "tier-forks.json",
    seed=7,
    seeded="of context, places and questions",
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())

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

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from benchmarks.accuracy.compactor_contexts import LOOK_ALIKES, RecallContext, make_context
from benchmarks.common.command import ROOT, run_command
from benchmarks.common.recall_engine import DEMO_MODEL, PROFILE_FILE, worker_environment
from benchmarks.common.remote import run_module
from benchmarks.tier.forks_engine import Fork, Job, Served
from kvtier.bench.options import parse_options
from kvtier.bench.planning import make_plans
from kvtier.bench.runner import LOCAL_TIER, TIER_VARIABLE, local_tier
from kvtier.bench.schema import Plan
from kvtier.bench.table import make_console
from kvtier.config import Settings
from kvtier.environment import describe_environment
from kvtier.errors import UsageError
from kvtier.sizes import parse_size
from kvtier.synthetic.recall import score_answer

SCHEMA_VERSION = 1
OUT = ROOT / "benchmarks" / "results" / "tier-forks.json"
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


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 when every bar is met, 1 when one is not or an engine failed, 2 for bad
    input."""
    return run_command("tier_forks", parse_arguments(argv), run)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.tier.forks", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--out", type=Path, default=OUT, metavar="FILE", help="JSON of the outcome (%(default)s)")
    add("--model-path", type=Path, default=DEMO_MODEL, help="a model of the recall language with "
        "head_profile.json beside its weights")  # fmt: skip
    add("--len", default="32k", help="context tokens (%(default)s)")
    add("--forks", type=int, default=20, help="random places (%(default)s)")
    add("--retention", type=float, default=0.25, help="share that CA heads keep (%(default)s)")
    add("--seed", type=int, default=7, help="of context, places and questions (%(default)s)")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Serve the forks in every way and return the outcome."""
    if not 0 < options.retention <= 1:
        raise UsageError("--retention", "a number in (0, 1]", options.retention)
    for name, least in (("forks", 1), ("seed", 0)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name}", f"at least {least}", getattr(options, name))
    tokens = parse_size(options.len, "--len")
    environment = describe_environment(options.seed).model_dump()
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    context = make_context(LOOK_ALIKES, options.seed, 0, tokens, min(QUESTIONS, tokens // 64))
    forks = choose_forks(context, options.forks, options.seed)
    share = {"RETENTION": str(options.retention)}
    arm = (options.model_path, context, forks)
    whole = serve("full", *arm, {}, held=True, forgets=False)
    tiered = serve("kvtier", *arm, share | {"TIER": LOCAL_TIER}, held=True, forgets=True)
    cold = serve("kvtier", *arm, share, held=False, forgets=True)
    rows = make_rows(forks, whole, tiered, cold)
    bars = make_bars(rows)
    make_console().print(make_table(rows, bars))
    return {
        "schema_version": SCHEMA_VERSION,
        "started_at": started,
        "wall_s": round(time.perf_counter() - began, 1),
        "environment": environment,
        "settings": {
            "model": options.model_path.name,
            "context_tokens": tokens,
            "context_kind": LOOK_ALIKES,
            "retention": options.retention,
            "seed": options.seed,
        },
        "context_bytes": {"full": whole.kv_bytes[0], "kvtier": sorted(set(tiered.kv_bytes))},
        "forks": [row.model_dump() for row in rows],
        "bars": bars,
    }


def choose_forks(context: RecallContext, count: int, seed: int) -> list[Fork]:
    """Random places, each with a question about a random fact that stands before it."""
    chance = random.Random(seed)
    ids = context.context_ids
    ends = {question: _find(ids, question.answer_ids) + len(question.answer_ids)
            for question in context.questions}  # fmt: skip
    least = max(int(len(ids) * LEAST_SHARE), min(ends.values()))
    places = range(least, len(ids) - Settings().locality.recent_tokens)
    if len(places) < count:
        raise UsageError("--len", f"a context with {count} places in its middle", len(ids))
    forks = []
    for place in chance.sample(places, count):
        known = [question for question, end in ends.items() if end <= place]
        asked = chance.choice(known)
        forks.append(Fork(place=place, prompt_ids=asked.prompt_ids, answer_ids=asked.answer_ids))
    return forks


def _find(ids: Sequence[int], part: Sequence[int]) -> int:
    """Where `part` stands in `ids`."""
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
        "--policies": policy,
        "--turns": "1",
        "--questions": "1",
        "--len": str(tokens),
        "--sessions": str(ROOM_CONTEXTS),
        "--budget-sessions": str(ROOM_CONTEXTS),
        "--prefill": "exact",
        "--model-path": str(model),
        "--head-profile": str(model / PROFILE_FILE),
    }
    _, plans = make_plans(parse_options([part for flag in flags.items() for part in flag]))
    return plans[0].plan


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


def make_bars(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What has to hold, and whether it does."""
    equal = sum(row.equal for row in rows)
    below = sum(row.restored_ms < row.recomputed_ms for row in rows)
    restored = statistics.median(row.restored_ms for row in rows)
    recomputed = statistics.median(row.recomputed_ms for row in rows)
    return [
        {
            "bar": "forks whose tokens are those of the whole cache",
            "value": f"{equal} of {len(rows)}",
            "met": equal == len(rows),
        },
        {
            "bar": "median TTFT below recomputing",
            "value": f"{restored:.0f} ms against {recomputed:.0f} ms",
            "met": restored < recomputed,
        },
        {
            "bar": "forks whose TTFT is below recomputing",
            "value": f"{below} of {len(rows)}",
            "met": below == len(rows),
        },
    ]


def make_table(rows: Sequence[Row], bars: Sequence[Mapping[str, Any]]) -> Table:
    """A line per fork, and the bars."""
    lines = [f"{bar['bar']}: {bar['value']}{'' if bar['met'] else '  NOT MET'}" for bar in bars]
    table = Table(title="Forks of a compressed context", caption="\n".join(lines))
    for column in ("fork at", "not computed", "tokens", "restored", "recomputed", "", "held"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.place}", f"{row.cached}",
            ("equal" if row.equal else "DIFFERENT") + ("" if row.right else ", both err"),
            f"{row.restored_ms:.0f} ms", f"{row.recomputed_ms:.0f} ms",
            f"{row.recomputed_ms / row.restored_ms:.1f}x less", f"{row.held_ms:.0f} ms",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(main())

"""Does a quality target hold? Kept shares and recall per kind of context, in the real engine.

    python -m benchmarks.accuracy.quality --targets 0.8 0.95

Contexts of four kinds, from filler with a few facts to text where almost every word counts, are
served once with the whole KV cache and once per target: with the model's head profile and the
share that its calibration curve gives each context. The contexts are of another seed than those
the curve was fitted on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict
from rich.table import Table

from benchmarks.accuracy.compactor_contexts import KINDS, Question, RecallContext, make_contexts
from benchmarks.common.command import ROOT, run_command
from benchmarks.common.recall_engine import DEMO_MODEL, PROFILE_FILE, Asked, ask_engine
from kvtier.bench.schema import RetainedTurn
from kvtier.bench.table import make_console
from kvtier.environment import describe_environment
from kvtier.errors import UsageError
from kvtier.heads.model.config import model_shape, read_config
from kvtier.heads.profile import full_profile, load_profile
from kvtier.sizes import parse_size
from kvtier.synthetic.recall import make_session

SCHEMA_VERSION = 1
# Facts per thousand tokens; the recall language has no room for much more than 60.
DENSITIES = {"a third facts": 30, "mostly facts": 55}
OUT = ROOT / "benchmarks" / "results" / "quality-targets.json"


class Row(BaseModel):
    """One kind of context under one target; means over its contexts.

    kept_share: of the context's tokens, by CA heads
    predicted:  quality that the curve promised
    recall:     share of codes right, over all questions; full_recall with the whole cache
    kv_ratio:   device bytes of the whole cache / of this one
    """

    model_config = ConfigDict(frozen=True)

    target: float
    kind: str
    nll: float
    kept_share: float
    predicted: float
    recall: float
    full_recall: float
    kv_ratio: float

    @property
    def holds(self) -> bool:
        """Whether recall kept the target's share of what the whole cache recalls."""
        return self.recall >= self.target * self.full_recall


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 when everything ran, 1 when the engine failed, 2 for bad input."""
    return run_command("quality", parse_arguments(argv), run)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.accuracy.quality", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--targets", type=float, nargs="+", default=[0.8, 0.95], help="quality targets (0.8 0.95)")
    add("--out", type=Path, default=OUT, metavar="FILE", help="JSON of the outcome (%(default)s)")
    add("--model-path", type=Path, default=DEMO_MODEL, help="a model of the recall language with "
        "head_profile.json and curve.json beside its weights")  # fmt: skip
    add("--len", default="4k", help="context tokens (%(default)s)")
    add("--contexts", type=int, default=8, help="contexts per kind (%(default)s)")
    add("--questions", type=int, default=16, help="questions per context (%(default)s)")
    add("--seed", type=int, default=2, help="of the contexts (%(default)s); the curve's is 0")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Serve every kind under every target and return the outcome."""
    for target in options.targets:
        if not 0 < target <= 1:
            raise UsageError("--targets", "numbers in (0, 1]", target)
    for name, least in (("contexts", 1), ("questions", 1), ("seed", 0)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name}", f"at least {least}", getattr(options, name))
    environment = describe_environment(options.seed).model_dump()
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    tokens = parse_size(options.len, "--len")
    model = options.model_path
    contexts = all_contexts(options.seed, options.contexts, tokens, options.questions)
    whole = full_profile(model_shape(read_config(str(model))), model.name)
    full = ask_engine(contexts, model, whole, {})
    rows: list[Row] = []
    for target in options.targets:
        settings = {"QUALITY": str(target), "CURVE": str(model / "curve.json")}
        served = ask_engine(contexts, model, load_profile(model / PROFILE_FILE), settings)
        rows += make_rows(target, full, served)
    make_console().print(make_table(rows))
    return {
        "schema_version": SCHEMA_VERSION,
        "started_at": started,
        "wall_s": round(time.perf_counter() - began, 1),
        "environment": environment,
        "settings": {
            "model": model.name,
            "context_tokens": tokens,
            "contexts_per_kind": options.contexts,
            "questions_per_context": options.questions,
            "seed": options.seed,
        },
        "rows": [row.model_dump() for row in rows],
        "mean_kept_share": {
            str(target): statistics.fmean(row.kept_share for row in rows if row.target == target)
            for target in options.targets
        },
    }


def all_contexts(seed: int, count: int, tokens: int, questions: int) -> list[RecallContext]:
    """The Compactor comparison's kinds, and contexts that are mostly facts."""
    contexts = [c for kind in KINDS for c in make_contexts(kind, seed, count, tokens, questions)]
    for number, (kind, facts) in enumerate(DENSITIES.items()):
        for index in range(count):
            rng = np.random.default_rng([seed, len(KINDS) + number, index])
            contexts.append(fact_context(rng, kind, index, tokens, questions, facts))
    return contexts


def fact_context(
    rng: np.random.Generator, kind: str, index: int, tokens: int, questions: int, facts_per_1k: int
) -> RecallContext:
    """A context with so many facts, of which some are asked about."""
    session = make_session(
        rng, tokens, questions, max(questions, facts_per_1k * tokens // 1000), invented_share=0.0
    )
    asked = tuple(Question(turn.prompt_ids, turn.answer_ids or ()) for turn in session.turns)
    return RecallContext(kind, index, tuple(session.context_ids.tolist()), asked)


def make_rows(target: float, full: Sequence[Asked], served: Sequence[Asked]) -> list[Row]:
    """A row per kind. full, served: the same contexts in the same order."""
    rows = []
    for kind in dict.fromkeys(one.kind for one in served):
        pairs = [
            (exact, kept)
            for exact, kept in zip(full, served, strict=True)
            if kept.kind == kind
        ]  # fmt: skip
        retained = [chosen_by_quality(kept) for _, kept in pairs]
        rows.append(
            Row(
                target=target,
                kind=kind,
                nll=statistics.fmean(turn.nll for turn in retained),
                kept_share=statistics.fmean(turn.retention for turn in retained),
                predicted=statistics.fmean(turn.quality for turn in retained),
                recall=statistics.fmean(r for _, kept in pairs for r in kept.recalls),
                full_recall=statistics.fmean(r for exact, _ in pairs for r in exact.recalls),
                kv_ratio=sum(e.kv_bytes for e, _ in pairs) / sum(k.kv_bytes for _, k in pairs),
            )
        )
    return rows


def chosen_by_quality(asked: Asked) -> RetainedTurn:
    """What a context kept. Raises UsageError when no curve had a say in it."""
    turn = asked.retained
    if turn is None or turn.reason != "quality":
        got = "too short to drop anything" if turn is None else turn.reason
        raise UsageError("--len", f"contexts that a quality target is for ({asked.kind})", got)
    return turn


def make_table(rows: Sequence[Row]) -> Table:
    """A line per target and kind."""
    table = Table(title="Quality targets: what contexts keep, and what they recall")
    for column in ("target", "context", "NLL", "kept", "recall", "of full", "KV less", "holds"):
        table.add_column(column, justify="left" if column == "context" else "right")
    for row in rows:
        table.add_row(
            f"{row.target:.2f}", row.kind, f"{row.nll:.2f}", f"{row.kept_share:.0%}",
            f"{row.recall:.3f}", f"{row.recall / row.full_recall:.3f}", f"{row.kv_ratio:.2f}x",
            "yes" if row.holds else "no",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(main())

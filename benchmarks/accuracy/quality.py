"""Does a quality target hold? Kept shares and recall per kind of context, in the real engine.

    python -m benchmarks.accuracy.quality --targets 0.8 0.95

Contexts of four kinds, from filler with a few facts to text where almost every word counts, are
served once with the whole KV cache and once per target: with the model's head profile and the
share that its calibration curve gives each context. The contexts are of another seed than those
the curve was fitted on.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict
from rich.table import Table

from benchmarks.common.bars import Bar, at_least
from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.recall_arguments import add_contexts, add_model, context_settings
from benchmarks.common.recall_contexts import KINDS, Question, RecallContext, make_contexts
from benchmarks.common.recall_engine import PROFILE_FILE, Asked, ask_engine
from benchmarks.common.table import new_table, show
from kvtier.errors import UsageError
from kvtier.heads.model.config import model_shape, read_config
from kvtier.heads.profile import full_profile, load_profile
from kvtier.synthetic.recall import make_session

# Facts per thousand tokens; the recall language has no room for much more than 60.
DENSITIES = {"a third facts": 30, "mostly facts": 55}


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
    def of_full(self) -> float:
        """Recall as a share of what the whole cache recalls."""
        return self.recall / self.full_recall


def declare(arguments: Arguments) -> None:
    arguments.shares("--targets", [0.8, 0.95], "quality targets")
    add_model(arguments, "head_profile.json and curve.json")
    add_contexts(arguments)


def run(options: Options) -> Measured:
    """Serve every kind of context under every target."""
    model = options.model_path
    contexts = all_contexts(options.seed, options.contexts, options.len, options.questions)
    whole = full_profile(model_shape(read_config(str(model))), model.name)
    full = ask_engine(contexts, model, whole, {})
    rows: list[Row] = []
    for target in options.targets:
        settings = {"QUALITY": str(target), "CURVE": str(model / "curve.json")}
        served = ask_engine(contexts, model, load_profile(model / PROFILE_FILE), settings)
        rows += make_rows(target, full, served)
    show(make_table(rows))
    figures = {
        "settings": context_settings(options),
        "rows": [row.model_dump() for row in rows],
        "mean_kept_share": {
            str(target): statistics.fmean(row.kept_share for row in rows if row.target == target)
            for target in options.targets
        },
    }
    return Measured(figures, make_bars(rows))


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
                nll=statistics.fmean(one.nll for one in retained),
                kept_share=statistics.fmean(one.share for one in retained),
                predicted=statistics.fmean(one.quality for one in retained),
                recall=statistics.fmean(r for _, kept in pairs for r in kept.recalls),
                full_recall=statistics.fmean(r for exact, _ in pairs for r in exact.recalls),
                kv_ratio=sum(e.kv_bytes for e, _ in pairs) / sum(k.kv_bytes for _, k in pairs),
            )
        )
    return rows


class Chosen(NamedTuple):
    """The share that the curve gave a context, with its NLL in nats and the quality promised."""

    nll: float
    share: float
    quality: float


def chosen_by_quality(asked: Asked) -> Chosen:
    """Return what a context kept. Raises UsageError when no curve had a say in it."""
    turn = asked.retained
    if turn is None or turn.reason != "quality":
        got = "too short to drop anything" if turn is None else turn.reason
        raise UsageError("--len", f"contexts that a quality target is for ({asked.kind})", got)
    assert turn.nll is not None
    assert turn.quality is not None
    return Chosen(turn.nll, turn.retention, turn.quality)


def make_bars(rows: Sequence[Row]) -> list[Bar]:
    """Every kind recalls the target's share of what the whole cache recalls."""
    return [
        at_least(f"{row.kind} at {row.target:g}: recall / full KV's", row.of_full, row.target)
        for row in rows
    ]


def make_table(rows: Sequence[Row]) -> Table:
    """A line per target and kind."""
    columns = ("target", "context", "NLL", "kept", "recall", "of full", "KV less")
    table = new_table(
        "Quality targets: what contexts keep, and what they recall", columns, left=["context"]
    )
    for row in rows:
        table.add_row(
            f"{row.target:.2f}", row.kind, f"{row.nll:.2f}", f"{row.kept_share:.0%}",
            f"{row.recall:.3f}", f"{row.of_full:.3f}", f"{row.kv_ratio:.2f}x",
        )  # fmt: skip
    return table


BENCHMARK = Benchmark(
    "accuracy.quality",
    __doc__,
    declare,
    run,
    out=RESULTS / "quality-targets.json",
    seed=2,
    seeded="of the contexts; the curve's is 0",
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())

"""kvtier's token scorers against NVIDIA kvpress: recall at equal kept KV bytes.

    python -m benchmarks.accuracy.compactor --peer-python benchmarks/peers/.venv/bin/python

Both get the same model, the same contexts and the same questions, asked one by one after the
context was compressed without knowing them. kvpress runs on transformers in an
environment of its own (benchmarks/peers/README.md), kvtier inside the real SGLang engine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.compactor_engine import DEFAULT_SCORER, METHODS, Heads, run_engine
from benchmarks.accuracy.compactor_records import (
    Record,
    Row,
    Scored,
    answered_by_full_cache,
    make_rows,
    margins,
)
from benchmarks.accuracy.compactor_table import print_tables
from benchmarks.accuracy.kvpress import PEER_PYTHON, run_kvpress
from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.recall_arguments import add_contexts, add_model, context_settings
from benchmarks.common.recall_contexts import KINDS, RecallContext, make_contexts
from kvtier.config import load_settings
from kvtier.retention.scorers import SCORERS

KEPT_SHARES = (0.75, 0.5, 0.25, 0.1)
PEER_METHOD = "kvpress Compactor"


def declare(arguments: Arguments) -> None:
    add = arguments.add
    add("--peer-python", type=Path, default=PEER_PYTHON, help="see benchmarks/peers/README.md")
    add_model(arguments)
    add_contexts(arguments)
    arguments.whole("--draws", 3, "draws of random presses")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of context")
    add("--sides", nargs="+", choices=("kvpress", *METHODS), default=["kvpress", *METHODS],
        help="kvpress, kvtier on all heads, kvtier with the head profile")  # fmt: skip
    names = [name for name, scorer in SCORERS.items() if not scorer.is_fitted]
    add("--scorers", nargs="+", choices=names, default=names, metavar="NAME",
        help="token scorers on all heads; with the profile the default one")  # fmt: skip
    arguments.shares("--shares", KEPT_SHARES, "of the KV bytes")


def run(options: Options) -> Measured:
    """Make the contexts, and run every side on each kind."""
    records: list[Record] = []
    peer: dict[str, Any] = {}
    for kind in options.kinds:
        contexts = make_contexts(
            kind, options.seed, options.contexts, options.len, options.questions
        )
        if "kvpress" in options.sides:
            peer = run_peer(contexts, options)
            records += [Record.model_validate(record) for record in peer.pop("records")]
        for heads in METHODS:
            if heads in options.sides:
                records += run_ours(contexts, heads, options)
    scored = answered_by_full_cache(records)
    rows = make_rows(records, scored)
    print_tables(rows, scored, METHODS["all"], PEER_METHOD)
    return Measured({"peer": peer, "settings": settings(options), **outcome(rows, scored)})


def settings(options: Options) -> dict[str, Any]:
    """Return what decides the contexts, how often they are compressed, and kvtier's own
    settings."""
    return {
        **context_settings(options),
        "draws": options.draws,
        "kept_shares": options.shares,
        "kvtier": load_settings().model_dump(mode="json", exclude={"data_dir"}),
    }


def outcome(rows: Sequence[Row], scored: Scored) -> dict[str, Any]:
    """Rows and margins as JSON, and per context how many questions were scored."""
    return {
        "scored_questions": {f"{kind} {index}": sum(q) for (kind, index), q in scored.items()},
        "rows": [row.model_dump(mode="json") for row in rows],
        "margins": [pair._asdict() for pair in margins(rows, METHODS["all"], PEER_METHOD)],
    }


def run_peer(contexts: Sequence[RecallContext], options: Options) -> dict[str, Any]:
    """kvpress at every share."""
    return run_kvpress(
        contexts,
        options.model_path,
        options.shares,
        python=options.peer_python,
        draws=options.draws,
    )


def run_ours(contexts: Sequence[RecallContext], heads: Heads, options: Options) -> list[Record]:
    """kvtier at every share with every scorer; on all heads also uncompressed, which proves the
    engine can answer."""
    model, records = options.model_path, []
    if heads == "all":
        records += run_engine(contexts, (1.0,), heads, model)
    scorers = options.scorers if heads == "all" else [DEFAULT_SCORER]
    for scorer in scorers:
        records += run_engine(contexts, options.shares, heads, model, scorer)
    return records


BENCHMARK = Benchmark(
    "accuracy.compactor",
    __doc__,
    declare,
    run,
    out=RESULTS / "compactor-vs-kvpress.json",
    seeded="of the contexts",
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())

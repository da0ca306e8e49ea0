"""kvtier's token scorers against NVIDIA kvpress: recall at equal kept KV bytes.

    python -m benchmarks.accuracy.compactor --peer-python benchmarks/peers/.venv/bin/python

Both get the same model, the same contexts and the same questions, asked one by one after the
context was compressed without knowing them. kvpress runs on transformers in an
environment of its own (benchmarks/peers/README.md), kvtier inside the real SGLang engine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.accuracy.compactor_contexts import KINDS, RecallContext, make_contexts
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
from benchmarks.common.command import ROOT, run_command
from benchmarks.common.recall_engine import DEMO_MODEL
from kvtier.config import load_settings
from kvtier.environment import describe_environment
from kvtier.retention.scorers import SCORERS
from kvtier.sizes import parse_size

SCHEMA_VERSION = 1
KEPT_SHARES = (0.75, 0.5, 0.25, 0.1)
OUT = ROOT / "benchmarks" / "results" / "compactor-vs-kvpress.json"
PEER_METHOD = "kvpress Compactor"


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 when everything ran, 1 when a side failed, 2 for bad input."""
    return run_command("compactor", parse_arguments(argv), run)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.accuracy.compactor", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--out", type=Path, default=OUT, metavar="FILE", help="JSON of the outcome (%(default)s)")
    add("--peer-python", type=Path, default=PEER_PYTHON, help="see benchmarks/peers/README.md")
    add("--model-path", type=Path, default=DEMO_MODEL, help="a model of the recall language")
    add("--len", default="4k", help="context tokens (%(default)s)")
    add("--contexts", type=int, default=8, help="contexts per kind (%(default)s)")
    add("--questions", type=int, default=16, help="questions per context (%(default)s)")
    add("--seed", type=int, default=0, help="of the contexts (%(default)s)")
    add("--draws", type=int, default=3, help="draws of random presses (%(default)s)")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of context")
    add("--sides", nargs="+", choices=("kvpress", *METHODS), default=["kvpress", *METHODS],
        help="kvpress, kvtier on all heads, kvtier with the head profile")  # fmt: skip
    add("--scorers", nargs="+", choices=list(SCORERS), default=list(SCORERS), metavar="NAME",
        help="token scorers on all heads; with the profile the default one")  # fmt: skip
    add("--shares", nargs="+", type=float, default=list(KEPT_SHARES), help="of the KV bytes")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Make the contexts, run every side on each kind, print tables and return the outcome."""
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    environment = describe_environment(options.seed).model_dump()
    tokens = parse_size(options.len, "--len")
    records: list[Record] = []
    peer: dict[str, Any] = {}
    for kind in options.kinds:
        contexts = make_contexts(kind, options.seed, options.contexts, tokens, options.questions)
        if "kvpress" in options.sides:
            peer = run_peer(contexts, options)
            records += [Record.model_validate(record) for record in peer.pop("records")]
        for heads in METHODS:
            if heads in options.sides:
                records += run_ours(contexts, heads, options)
    scored = answered_by_full_cache(records)
    rows = make_rows(records, scored)
    print_tables(rows, scored, METHODS["all"], PEER_METHOD)
    return {
        "schema_version": SCHEMA_VERSION,
        "started_at": started,
        "wall_s": round(time.perf_counter() - began, 1),
        "environment": environment,
        "peer": peer,
        "settings": settings(options, tokens),
        **outcome(rows, scored),
    }


def settings(options: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """What decides the contexts, how often they are compressed, and kvtier's own settings."""
    return {
        "model": options.model_path.name,
        "context_tokens": tokens,
        "contexts_per_kind": options.contexts,
        "questions_per_context": options.questions,
        "seed": options.seed,
        "draws": options.draws,
        "kept_shares": options.shares,
        "kvtier": load_settings().model_dump(mode="json"),
    }


def outcome(rows: Sequence[Row], scored: Scored) -> dict[str, Any]:
    """Rows and margins as JSON, and per context how many questions were scored."""
    return {
        "scored_questions": {f"{kind} {index}": sum(q) for (kind, index), q in scored.items()},
        "rows": [row.model_dump(mode="json") for row in rows],
        "margins": [pair._asdict() for pair in margins(rows, METHODS["all"], PEER_METHOD)],
    }


def run_peer(contexts: Sequence[RecallContext], options: argparse.Namespace) -> dict[str, Any]:
    """kvpress at every share."""
    return run_kvpress(
        contexts,
        options.model_path,
        options.shares,
        python=options.peer_python,
        draws=options.draws,
    )


def run_ours(
    contexts: Sequence[RecallContext], heads: Heads, options: argparse.Namespace
) -> list[Record]:
    """kvtier at every share with every scorer; on all heads also uncompressed, which proves the
    engine can answer."""
    model, records = options.model_path, []
    if heads == "all":
        records += run_engine(contexts, (1.0,), heads, model)
    scorers = options.scorers if heads == "all" else [DEFAULT_SCORER]
    for scorer in scorers:
        records += run_engine(contexts, options.shares, heads, model, scorer)
    return records


if __name__ == "__main__":
    sys.exit(main())

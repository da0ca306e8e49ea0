"""Flags and settings of the benchmarks that ask a model of the recall language."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.arguments import Arguments, Options
from benchmarks.common.benchmark import ROOT

DEMO_MODEL = ROOT / "models" / "kvtier-demo"


def add_model(arguments: Arguments, beside: str = "") -> None:
    """--model-path. beside: the files that have to lie beside the model's weights."""
    about = "a model of the recall language"
    with_files = f" with {beside} beside its weights" if beside else ""
    arguments.add(
        "--model-path", type=Path, default=DEMO_MODEL, metavar="DIR", help=about + with_files
    )


def add_contexts(arguments: Arguments) -> None:
    """--len, --contexts and --questions."""
    arguments.size("--len", "4k", "context tokens")
    arguments.whole("--contexts", 8, "contexts per kind")
    arguments.whole("--questions", 16, "questions per context")


def context_settings(options: Options) -> dict[str, Any]:
    """The model and what decides its contexts, as it stands in the JSON."""
    return {
        "model": options.model_path.name,
        "context_tokens": options.len,
        "contexts_per_kind": options.contexts,
        "questions_per_context": options.questions,
        "seed": options.seed,
    }


__all__ = ["DEMO_MODEL", "add_contexts", "add_model", "context_settings"]

"""Several methods side by side: which heads each chooses, and what that costs, measured.

Agreement is the Jaccard index with the first method's CA heads: heads in both / heads in either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvtier.environment import describe_environment
from kvtier.heads.probes.quality import Quality
from kvtier.heads.profile import Head, HeadProfile
from kvtier.heads.report import PLAIN_WIDTH
from kvtier.sizes import format_size

if TYPE_CHECKING:
    from kvtier.heads.calibrate import Calibrated, CalibrationRun
    from kvtier.heads.verify import Verification

SCHEMA_VERSION = 1


def jaccard(first: HeadProfile, second: HeadProfile) -> float:
    """CA heads in both / CA heads in either, in [0, 1]; two empty choices agree."""
    ours, theirs = _heads(first), _heads(second)
    return len(ours & theirs) / len(ours | theirs) if ours | theirs else 1.0


def _heads(profile: HeadProfile) -> set[Head]:
    return {(layer, head) for layer, row in enumerate(profile.ca_heads) for head in row}


def comparison_document(run: CalibrationRun) -> dict[str, Any]:
    """Everything a comparison found, as JSON; qualities as in `Quality`."""
    first = run.results[0].profile
    return {
        "schema_version": SCHEMA_VERSION,
        "model": first.model,
        "revision": first.revision,
        "shape": first.shape.model_dump(mode="json"),
        **run.description,
        "prefill_seconds": round(run.prefill_seconds, 2),
        "methods": [_method(result, first) for result in run.results],
        "curve": [
            {"num_ca_heads": point.num_heads, "measured": _groups(point.verifications)}
            for point in run.curve
        ],
        "environment": asdict(describe_environment(run.description["seed"])),
    }


def _method(result: Calibrated, first: HeadProfile) -> dict[str, Any]:
    profile = result.profile
    return {
        "method": result.label,
        "rule": _rule(profile),
        "ca_heads": [list(row) for row in profile.ca_heads],
        "num_ca_heads": profile.num_ca_heads,
        "ca_share": profile.ca_share,
        "agreement": jaccard(first, profile),
        "seconds": round(result.seconds, 2),
        "measured": _groups(result.verifications),
        "scores": profile.scores,
        "parameters": {
            name: value for name, value in profile.parameters.items() if name not in _SAID_ELSEWHERE
        },
    }


_SAID_ELSEWHERE = {
    "lengths", "contexts_per_length", "tasks", "tasks_measured", "seed", "control",
}  # fmt: skip


def _groups(verifications: Sequence[Verification]) -> list[dict[str, Any]]:
    return [
        {
            "context_tokens": found.context_tokens,
            **_measured(found),
            "tasks": {task: _measured(one) for task, one in found.tasks.items()},
        }
        for found in verifications
    ]


def _measured(found: Verification) -> dict[str, Any]:
    return {
        "answers": found.answers,
        "full": _quality(found.full),
        "profile": _quality(found.profile),
        "random": _quality(found.random),
        "no_heads": _quality(found.window),
        "kept_worth": None if math.isnan(found.worth) else found.worth,
    }


def _quality(quality: Quality) -> dict[str, float]:
    """As a profile names them: whole answers, answer tokens, loss."""
    return {"recall": quality.recall, "token_recall": quality.tokens, "nll": quality.loss}


def _rule(profile: HeadProfile) -> str:
    """How many heads were asked for."""
    asked = {name: profile.parameters.get(name) for name in ("share", "budget")}
    return ", ".join(f"{k} {v:g}" for k, v in asked.items() if v is not None) or "own rule"


def comparison_table(run: CalibrationRun, terminal_width: int | None = None) -> str:
    """The comparison for people; `terminal_width` None where no terminal is to be filled."""
    from rich.console import Console
    from rich.table import Table

    results = run.results
    total = results[0].profile.shape.num_layers * results[0].profile.shape.num_kv_heads
    sizes = [format_size(found.context_tokens) for found in results[0].verifications]
    measured = [f"{size} {what}" for size in sizes for what in ("full", "profile", "random")]
    table = Table(title=_title(results), title_justify="left")
    for name in ("method", "asked for", "CA heads", "share", *measured, "agreement", "seconds"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for result in results:
        profile = result.profile
        recalls = [
            f"{quality.recall:.1%}"
            for found in result.verifications
            for quality in (found.full, found.profile, found.random)
        ]
        table.add_row(
            result.label, _rule(profile), f"{profile.num_ca_heads} of {total}",
            f"{profile.ca_share:.0%}", *recalls, f"{jaccard(results[0].profile, profile):.2f}",
            f"{result.seconds:.1f}",
        )  # fmt: skip
    console = Console(width=terminal_width or PLAIN_WIDTH, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip("\n")


def _title(results: Sequence[Calibrated]) -> str:
    profile = results[0].profile
    measured = ", ".join(
        f"{found.answers} answers at {format_size(found.context_tokens)}"
        for found in results[0].verifications
    )
    return f"{profile.model}: recall of {measured}"

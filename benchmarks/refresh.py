"""What a refresh at the turn's beginning is worth: recall at equal bytes, in the real engine.

    python -m benchmarks.refresh --shares 0.25 0.1

The same contexts and questions are served with the whole cache, with a share of it that was chosen
before anybody asked (Compactor), and with the same share chosen again when the question is known,
from the exact KV in a tier: what is not kept dropped, or merged (KeepKV, both forms).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from benchmarks.compactor_contexts import KINDS, RecallContext, make_contexts
from benchmarks.recall_engine import DEMO_MODEL, PROFILE_FILE, ROOT, Asked, ask_engine
from kvtier.bench.environment import describe_environment
from kvtier.bench.runner import LOCAL_TIER, TIER_VARIABLE, local_tier
from kvtier.bench.table import make_console
from kvtier.errors import KvtierError, UsageError
from kvtier.heads.profile import load_profile
from kvtier.sizes import parse_size

SCHEMA_VERSION = 1
OUT = ROOT / "benchmarks" / "results" / "refresh.json"
NO_REFRESH = "chosen beforehand"
ARMS = {
    NO_REFRESH: {},
    "chosen again": {"REFRESH": "turn"},
    "merged, β": {"REFRESH": "turn", "MERGE": "beta"},
    "merged, paper": {"REFRESH": "turn", "MERGE": "paper"},
}


class Row(BaseModel):
    """One way to keep one share, over the contexts of one kind.

    recall:     share of codes right, over all questions; full_recall with the whole cache
    kv_bytes:   of a resting context on the device
    refreshed:  requests that chose anew, of `questions`; refresh_ms: each, inside its prefill
    """

    model_config = ConfigDict(frozen=True)

    share: float
    arm: str
    kind: str
    recall: float
    full_recall: float
    kv_bytes: float
    questions: int
    refreshed: int
    refresh_ms: float


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 when everything ran, 1 when the engine failed, 2 for bad input."""
    options = parse_arguments(argv)
    try:
        document = run(options)
    except UsageError as error:
        print(f"benchmarks.refresh: error: {error}", file=sys.stderr)
        return 2
    except KvtierError as error:
        print(f"benchmarks.refresh: {error}", file=sys.stderr)
        return 1
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.refresh", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--shares", type=float, nargs="+", default=[0.25, 0.1], help="CA heads keep (0.25 0.1)")
    add("--out", type=Path, default=OUT, metavar="FILE", help="JSON of the outcome (%(default)s)")
    add("--model-path", type=Path, default=DEMO_MODEL, help="a model of the recall language with "
        "head_profile.json beside its weights")  # fmt: skip
    add("--len", default="4k", help="context tokens (%(default)s)")
    add("--contexts", type=int, default=8, help="contexts per kind (%(default)s)")
    add("--questions", type=int, default=16, help="questions per context (%(default)s)")
    add("--seed", type=int, default=5, help="of the contexts (%(default)s)")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Serve every context in every way and return the outcome."""
    for share in options.shares:
        if not 0 < share <= 1:
            raise UsageError("--shares", "numbers in (0, 1]", share)
    for name, least in (("contexts", 1), ("questions", 1), ("seed", 0)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name}", f"at least {least}", getattr(options, name))
    environment = describe_environment(options.seed).model_dump()
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    tokens = parse_size(options.len, "--len")
    contexts = [
        context
        for kind in KINDS
        for context in make_contexts(
            kind, options.seed, options.contexts, tokens, options.questions
        )
    ]
    full = serve(contexts, options.model_path, {})
    rows: list[Row] = []
    for share in options.shares:
        for arm, settings in ARMS.items():
            served = serve(contexts, options.model_path, {"RETENTION": str(share), **settings})
            rows += make_rows(share, arm, full, served)
    make_console().print(make_table(rows))
    return {
        "schema_version": SCHEMA_VERSION,
        "started_at": started,
        "wall_s": round(time.perf_counter() - began, 1),
        "environment": environment,
        "settings": {
            "model": options.model_path.name,
            "context_tokens": tokens,
            "contexts_per_kind": options.contexts,
            "questions_per_context": options.questions,
            "seed": options.seed,
        },
        "rows": [row.model_dump() for row in rows],
    }


def serve(contexts: Sequence[RecallContext], model: Path, settings: dict[str, str]) -> list[Asked]:
    """All contexts in an engine of their own, with a tier of its own where it refreshes."""
    wanted = {TIER_VARIABLE: LOCAL_TIER} if "REFRESH" in settings else {}
    profile = load_profile(model / PROFILE_FILE)
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-refresh-") as folder,
        local_tier(wanted, Path(folder) / "tier.log") as tier,
    ):
        address = {"TIER": tier[TIER_VARIABLE]} if tier else {}
        return ask_engine(contexts, model, profile, settings | address)


def make_rows(share: float, arm: str, full: Sequence[Asked], served: Sequence[Asked]) -> list[Row]:
    """A row per kind. full, served: the same contexts in the same order."""
    rows = []
    before, before_s = 0, 0.0
    for kind in dict.fromkeys(one.kind for one in served):
        mine = [one for one in served if one.kind == kind]
        exact = [one for one in full if one.kind == kind]
        # The engine counts on from one kind to the next.
        last = mine[-1].tier
        refreshed = 0 if last is None else last.refreshed_turns - before
        seconds = 0.0 if last is None else last.refresh_s - before_s
        if last is not None:
            before, before_s = last.refreshed_turns, last.refresh_s
        rows.append(
            Row(
                share=share,
                arm=arm,
                kind=kind,
                recall=statistics.fmean(r for one in mine for r in one.recalls),
                full_recall=statistics.fmean(r for one in exact for r in one.recalls),
                kv_bytes=statistics.fmean(one.kv_bytes for one in mine),
                questions=sum(len(one.recalls) for one in mine),
                refreshed=refreshed,
                refresh_ms=1e3 * seconds / refreshed if refreshed else 0.0,
            )
        )
    return rows


def make_table(rows: Sequence[Row]) -> Table:
    """A line per share, arm and kind."""
    table = Table(title="A share chosen before and after the question is known")
    columns = ("kept", "context", "entries", "recall", "of full", "KV MiB", "refreshed", "each")
    for column in columns:
        left = column in ("context", "entries")
        table.add_column(column, justify="left" if left else "right")
    for row in rows:
        table.add_row(
            f"{row.share:.0%}", row.kind, row.arm, f"{row.recall:.3f}",
            f"{row.recall / row.full_recall:.3f}", f"{row.kv_bytes / 2**20:.2f}",
            f"{row.refreshed} of {row.questions}" if row.refreshed else "-",
            f"{row.refresh_ms:.1f} ms" if row.refreshed else "-",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(main())

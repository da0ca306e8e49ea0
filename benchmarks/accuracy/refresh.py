"""What a refresh at the turn's beginning is worth: recall at equal bytes, in the real engine.

    python -m benchmarks.accuracy.refresh --shares 0.25 0.1

The same contexts and questions are served with the whole cache, with a share of it that was chosen
before any question (Compactor), and with the same share chosen again when the question is known,
from the exact KV in a tier: by the engine or by the tier, what is not kept dropped or merged
(KeepKV, both forms). With `--peer-python`, kvpress keeps the same share of the bytes, dropping and
merging; benchmarks/peers/README.md has the rules.

    heads all        every KV head keeps the share, as in kvpress; 8 first and 32 last tokens aside
    heads profile    the model's profile, kvtier's own windows; the share is that of CA heads
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from benchmarks.accuracy.compactor_contexts import KINDS, RecallContext, make_contexts
from benchmarks.accuracy.compactor_engine import Heads, head_profile, retention_for
from benchmarks.accuracy.compactor_records import Record
from benchmarks.accuracy.kvpress import run_kvpress
from benchmarks.common.command import ROOT, run_command
from benchmarks.common.recall_engine import DEMO_MODEL, Asked, ask_engine
from kvtier.bench.runner import LOCAL_TIER, TIER_VARIABLE, local_tier
from kvtier.bench.schema import TierReading
from kvtier.bench.table import make_console
from kvtier.config import ENV_PREFIX
from kvtier.environment import describe_environment
from kvtier.errors import UsageError
from kvtier.sizes import parse_size

SCHEMA_VERSION = 1
OUT = ROOT / "benchmarks" / "results" / "refresh.json"
NO_REFRESH = "chosen beforehand"
ARMS = {
    NO_REFRESH: {},
    "chosen again": {"REFRESH": "turn"},
    "chosen by the tier": {"REFRESH": "turn", "REFRESH_BY": "near-data"},
    "merged, β": {"REFRESH": "turn", "MERGE": "beta"},
    "merged, paper": {"REFRESH": "turn", "MERGE": "paper"},
}
# Few sink and recent tokens, or they are all that a tenth of 4k may keep; spans fit them.
WINDOWS: dict[Heads, dict[str, str]] = {
    "all": {"LOCALITY_SINK_TOKENS": "8", "LOCALITY_RECENT_TOKENS": "32", "TIER_SPAN_TOKENS": "32"},
    "profile": {},
}
PEER_METHODS = ("kvpress Compactor", "kvpress Compactor, merging", "kvpress KeyDiff, merging")


class Row(BaseModel):
    """One way to keep one share, over the contexts of one kind.

    recall:     share of codes right, over all questions; full_recall with the whole cache
    kv_bytes:   of a resting context on the device
    refreshed:  requests that chose anew, of `questions`; refresh_ms: each, inside its prefill
    moved_bytes: from and to the tier, for each of them
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
    moved_bytes: float = 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 when everything ran, 1 when the engine failed, 2 for bad input."""
    return run_command("refresh", parse_arguments(argv), run)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.accuracy.refresh", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--shares", type=float, nargs="+", default=[0.25, 0.1], help="CA heads keep (0.25 0.1)")
    add("--out", type=Path, default=OUT, metavar="FILE", help="JSON of the outcome (%(default)s)")
    add("--model-path", type=Path, default=DEMO_MODEL, help="a model of the recall language with "
        "head_profile.json beside its weights")  # fmt: skip
    add("--len", default="4k", help="context tokens (%(default)s)")
    add("--contexts", type=int, default=8, help="contexts per kind (%(default)s)")
    add("--questions", type=int, default=16, help="questions per context (%(default)s)")
    add("--heads", choices=list(WINDOWS), default="all", help="see above (%(default)s)")
    add("--peer-python", type=Path, metavar="FILE", help="compare with its kvpress; heads all only")
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
    if options.peer_python is not None and options.heads != "all":
        raise UsageError("--peer-python", "--heads all: kvpress compresses every head", "profile")
    model, heads = options.model_path, options.heads
    full = serve(contexts, model, heads, {})
    rows: list[Row] = []
    for share in options.shares:
        for arm, settings in ARMS.items():
            retention = share
            if heads == "all":
                profile, merges = head_profile(model, heads), "MERGE" in settings
                retention = retention_for(share, profile, tokens, merges=merges)
            kept = {"RETENTION": f"{retention:.9f}", **settings}
            rows += make_rows(share, arm, full, serve(contexts, model, heads, kept))
    if options.peer_python is not None:
        rows += peer_rows(contexts, options, full)
    make_console().print(make_table(rows))
    return {
        "schema_version": SCHEMA_VERSION,
        "started_at": started,
        "wall_s": round(time.perf_counter() - began, 1),
        "environment": environment,
        "settings": {
            "model": options.model_path.name,
            "heads": heads,
            "context_tokens": tokens,
            "contexts_per_kind": options.contexts,
            "questions_per_context": options.questions,
            "seed": options.seed,
        },
        "rows": [row.model_dump() for row in rows],
    }


def serve(
    contexts: Sequence[RecallContext], model: Path, heads: Heads, settings: dict[str, str]
) -> list[Asked]:
    """All contexts in an engine of their own, with a tier of its own where it refreshes."""
    wanted = {ENV_PREFIX + name: value for name, value in settings.items()}
    if "REFRESH" in settings:
        wanted[TIER_VARIABLE] = LOCAL_TIER
    profile = head_profile(model, heads)
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-refresh-") as folder,
        local_tier(wanted, Path(folder) / "tier.log") as tier,
    ):
        address = {"TIER": tier[TIER_VARIABLE]} if tier else {}
        return ask_engine(contexts, model, profile, WINDOWS[heads] | settings | address)


def peer_rows(
    contexts: Sequence[RecallContext], options: argparse.Namespace, full: Sequence[Asked]
) -> list[Row]:
    """kvpress on the same contexts, a row per share, method and kind; its draws averaged."""
    found = run_kvpress(
        contexts, options.model_path, options.shares,
        python=options.peer_python, draws=3, methods=PEER_METHODS,
    )  # fmt: skip
    records = [Record.model_validate(record) for record in found["records"]]
    groups = defaultdict(list)
    for record in records:
        groups[record.kept_share, record.method, record.kind].append(record)
    return [
        Row(
            share=share,
            arm=method,
            kind=kind,
            recall=statistics.fmean(r for one in group for r in one.recalls),
            full_recall=mean_recall(one for one in full if one.kind == kind),
            kv_bytes=statistics.fmean(one.kv_bytes for one in group),
            questions=sum(len(one.recalls) for one in group if one.seed == 0),
            refreshed=0,
            refresh_ms=0.0,
        )
        for (share, method, kind), group in groups.items()
        if method in PEER_METHODS
    ]


def mean_recall(asked: Iterable[Asked]) -> float:
    return statistics.fmean(r for one in asked for r in one.recalls)


def make_rows(share: float, arm: str, full: Sequence[Asked], served: Sequence[Asked]) -> list[Row]:
    """A row per kind. full, served: the same contexts in the same order."""
    rows = []
    before = TierReading()
    for kind in dict.fromkeys(one.kind for one in served):
        mine = [one for one in served if one.kind == kind]
        # The engine counts on from one kind to the next.
        last = mine[-1].tier or before
        refreshed = last.refreshed_turns - before.refreshed_turns
        seconds = last.refresh_s - before.refresh_s
        moved = last.refresh_moved_bytes - before.refresh_moved_bytes
        before = last
        rows.append(
            Row(
                share=share,
                arm=arm,
                kind=kind,
                recall=mean_recall(mine),
                full_recall=mean_recall(one for one in full if one.kind == kind),
                kv_bytes=statistics.fmean(one.kv_bytes for one in mine),
                questions=sum(len(one.recalls) for one in mine),
                refreshed=refreshed,
                refresh_ms=1e3 * seconds / refreshed if refreshed else 0.0,
                moved_bytes=moved / refreshed if refreshed else 0.0,
            )
        )
    return rows


def make_table(rows: Sequence[Row]) -> Table:
    """A line per share, arm and kind."""
    table = Table(title="A share chosen before and after the question is known")
    columns = (
        *("kept", "context", "entries", "recall", "of full", "KV MiB"),
        *("refreshed", "each", "moved MiB"),
    )
    for column in columns:
        left = column in ("context", "entries")
        table.add_column(column, justify="left" if left else "right")
    for row in rows:
        table.add_row(
            f"{row.share:.0%}", row.kind, row.arm, f"{row.recall:.3f}",
            f"{row.recall / row.full_recall:.3f}", f"{row.kv_bytes / 2**20:.2f}",
            f"{row.refreshed} of {row.questions}" if row.refreshed else "-",
            f"{row.refresh_ms:.1f} ms" if row.refreshed else "-",
            f"{row.moved_bytes / 2**20:.2f}" if row.refreshed else "-",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(main())

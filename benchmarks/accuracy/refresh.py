"""The worth of a refresh at the turn's beginning: recall at equal bytes, in the real engine.

    python -m benchmarks.accuracy.refresh --shares 0.25 0.1

The same contexts and questions are served with the whole cache, with a share of it that was chosen
before any question, and with the same share chosen again when the question is known. It is chosen
from the exact KV in a tier, by the engine or by the tier, and what is not kept is dropped or merged
(KeepKV). With `--peer-python`, kvpress keeps the same share of the bytes, dropping and merging;
benchmarks/peers/README.md has the rules.

    heads all        every KV head keeps the share, as in kvpress; 8 first and 32 last tokens aside
    heads profile    the model's profile, kvtier's own windows; the share is that of CA heads
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from benchmarks.accuracy.compactor_engine import Heads, head_profile, retention_for
from benchmarks.accuracy.compactor_records import Record
from benchmarks.accuracy.kvpress import run_kvpress
from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.recall_arguments import add_contexts, add_model, context_settings
from benchmarks.common.recall_contexts import KINDS, RecallContext, make_contexts
from benchmarks.common.recall_engine import Asked, ask_engine
from benchmarks.common.table import new_table, show
from kvtier.bench.runner import LOCAL_TIER, TIER_VARIABLE, local_tier
from kvtier.bench.schema import TierReading
from kvtier.config import ENV_PREFIX
from kvtier.errors import UsageError

NO_REFRESH = "chosen beforehand"
ARMS: Mapping[str, dict[str, str]] = {
    NO_REFRESH: {},
    "chosen again": {"REFRESH": "turn"},
    "chosen by the tier": {"REFRESH": "turn", "REFRESH_BY": "near-data"},
    "merged": {"REFRESH": "turn", "MERGE": "keepkv"},
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


def declare(arguments: Arguments) -> None:
    arguments.shares("--shares", [0.25, 0.1], "CA heads keep")
    add_model(arguments, "head_profile.json")
    add_contexts(arguments)
    arguments.add("--heads", choices=list(WINDOWS), default="all", help="see above (%(default)s)")
    arguments.add(
        "--peer-python", type=Path, metavar="FILE", help="compare with its kvpress; heads all only"
    )
    arguments.check(peers_compress_every_head)


def peers_compress_every_head(options: Options) -> None:
    if options.peer_python is not None and options.heads != "all":
        raise UsageError("--peer-python", "--heads all: kvpress compresses every head", "profile")


def run(options: Options) -> Measured:
    """Serve every context in every way."""
    contexts = [
        context
        for kind in KINDS
        for context in make_contexts(
            kind, options.seed, options.contexts, options.len, options.questions
        )
    ]
    model, heads = options.model_path, options.heads
    full = serve(contexts, model, heads, {})
    rows: list[Row] = []
    for share in options.shares:
        for arm, settings in ARMS.items():
            retention = share
            if heads == "all":
                profile, merges = head_profile(model, heads), "MERGE" in settings
                retention = retention_for(share, profile, options.len, merges=merges)
            kept = {"RETENTION": f"{retention:.9f}", **settings}
            rows += make_rows(share, arm, full, serve(contexts, model, heads, kept))
    if options.peer_python is not None:
        rows += peer_rows(contexts, options, full)
    show(make_table(rows))
    return Measured(
        {
            "settings": {"heads": heads, **context_settings(options)},
            "rows": [row.model_dump() for row in rows],
        }
    )


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
    contexts: Sequence[RecallContext], options: Options, full: Sequence[Asked]
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
    columns = (
        *("kept", "context", "entries", "recall", "of full", "KV MiB"),
        *("refreshed", "each", "moved MiB"),
    )
    title = "A share chosen before and after the question is known"
    table = new_table(title, columns, left=["context", "entries"])
    for row in rows:
        table.add_row(
            f"{row.share:.0%}", row.kind, row.arm, f"{row.recall:.3f}",
            f"{row.recall / row.full_recall:.3f}", f"{row.kv_bytes / 2**20:.2f}",
            f"{row.refreshed} of {row.questions}" if row.refreshed else "-",
            f"{row.refresh_ms:.1f} ms" if row.refreshed else "-",
            f"{row.moved_bytes / 2**20:.2f}" if row.refreshed else "-",
        )  # fmt: skip
    return table


BENCHMARK = Benchmark(
    "accuracy.refresh",
    __doc__,
    declare,
    run,
    out=RESULTS / "refresh.json",
    seed=5,
    seeded="of the contexts",
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())

"""The outcome of the Compactor comparison as terminal tables, one per kind of context."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.accuracy.compactor_records import Margin, Row, Scored, margins
from benchmarks.common.table import new_table
from kvtier.bench.table import NOTHING, make_console
from kvtier.sizes import format_bytes

# Kept bytes within this of each other count as equal: one token of a context has to go somewhere.
SAME_BYTES = 0.002


def print_tables(
    rows: Sequence[Row], scored: Scored, ours: str, theirs: str, to: Console | None = None
) -> None:
    """One table per kind: a line per method, a column per kept share."""
    console = to or make_console()
    for kind in dict.fromkeys(row.kind for row in rows):
        of_kind = [row for row in rows if row.kind == kind]
        console.print(make_table(kind, of_kind))
        console.print(describe_scored(kind, scored))
        for pair in margins(of_kind, ours, theirs):
            console.print(describe_margin(pair, ours, theirs))


def make_table(kind: str, rows: Sequence[Row]) -> Table:
    """Mean recall ± standard error over contexts, and under each share its bytes."""
    shares = sorted({row.kept_share for row in rows}, reverse=True)
    columns = ("method", *(f"{share:.0%}" for share in shares))
    table = new_table(f"{kind}: recall at kept share of the KV bytes", columns)
    for method in dict.fromkeys(row.method for row in rows):
        table.add_row(method, *(cell(rows, method, share) for share in shares))
    return table


def cell(rows: Sequence[Row], method: str, share: float) -> str:
    """`0.98 ± 0.01` and the kept bytes, or nothing where it was not measured."""
    for row in rows:
        if row.method == method and row.kept_share == share:
            recall = f"{row.recall:.3f} ± {row.standard_error:.3f}"
            return f"{recall}\n{format_bytes(row.kv_bytes)}"
    return NOTHING


def describe_scored(kind: str, scored: Scored) -> str:
    """Say how many questions the table is about."""
    asked = [
        question for (of, _), questions in scored.items() if of == kind for question in questions
    ]
    if not asked:
        return "  over all questions: there was no run with the full cache"
    return f"  over {sum(asked)} of {len(asked)} questions: those the full cache answers right"


def describe_margin(pair: Margin, ours: str, theirs: str) -> str:
    """A margin in one line."""
    same = abs(pair.bytes_ratio - 1) <= SAME_BYTES
    held = "the same bytes" if same else f"{pair.bytes_ratio:.3f} times the bytes"
    return (
        f"  {pair.kept_share:4.0%}: {ours} - {theirs} = {pair.recall:+.3f} "
        f"± {pair.standard_error:.3f} with {held}"
    )

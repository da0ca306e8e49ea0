"""Tables of benchmarks on the terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.table import Table

from kvtier.bench.table import make_console


def new_table(title: str, columns: Sequence[str], *, left: Collection[str] | None = None) -> Table:
    """An empty table. left: columns of words, the first one unless said; numbers stand right."""
    words = columns[:1] if left is None else left
    table = Table(title=title, title_justify="left")
    for column in columns:
        if column in words:
            table.add_column(column, no_wrap=True)
        else:
            table.add_column(column, justify="right")
    return table


def show(table: Table) -> None:
    """Print a table."""
    make_console().print(table)

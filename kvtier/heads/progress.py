"""The progress of a calibration: what long-running steps report to, and a live bar for the
terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

Progress = Callable[[str, int, int], None]
"""A callback (what is being done, steps done, steps in all)."""

Item = TypeVar("Item")


def no_progress(stage: str, done: int, total: int) -> None:
    """Reports nothing."""


def each(items: Sequence[Item], stage: str, progress: Progress) -> Iterator[Item]:
    """The items, one step of a stage each."""
    for done, item in enumerate(items):
        progress(stage, done, len(items))
        yield item
    progress(stage, len(items), len(items))


@contextmanager
def rich_progress() -> Iterator[Progress]:
    """One live bar on standard error, named by what is being done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bars(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("calibration")

        def report(stage: str, done: int, total: int) -> None:
            bars.update(task, description=stage, completed=done, total=total)

        yield report


def shown_progress(quiet: bool) -> AbstractContextManager[Progress]:
    """The live bar, or what reports nothing to somebody who wants it quiet."""
    return nullcontext(no_progress) if quiet else rich_progress()

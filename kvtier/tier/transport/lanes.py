"""A second thread for copies and checksums, which let go of Python's lock.

One core copies and checks at less than the speed of memory; two get near it. The caller's thread
is the other one, so nothing ever waits for a thread that is busy elsewhere.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Job = Callable[[], None]
Result = TypeVar("Result")


class Lanes:
    """Thread-safe; calls at the same time share the second thread. No job may wait for another."""

    def __init__(self) -> None:
        # Its thread begins with its first job.
        self._second = ThreadPoolExecutor(1, thread_name_prefix="kvtier-landing")

    def run(self, jobs: Iterable[Job]) -> None:
        """Run all of them, in any order, in this thread and in the other one.

        Returns when none is running any more. Raises what one that failed raised; those that had
        not begun by then never do.
        """
        waiting = deque(jobs)
        helping = self.later(lambda: _drain(waiting)) if len(waiting) > 1 else None
        try:
            _drain(waiting)
        finally:
            # A helper that has not begun by now has nothing left to do.
            if helping is not None and not helping.cancel():
                helping.result()

    def later(self, job: Callable[[], Result]) -> Future[Result] | None:
        """Run it in the other thread, in the order given; not at all, and None, once closed."""
        # Closed, or Python ends.
        with contextlib.suppress(RuntimeError):
            return self._second.submit(job)
        return None

    def close(self) -> None:
        """Jobs under way end by themselves; from now on `run` runs them all in its own thread."""
        self._second.shutdown(wait=False)


def _drain(waiting: deque[Job]) -> None:
    try:
        while (job := _next(waiting)) is not None:
            job()
    except BaseException:
        waiting.clear()
        raise


def _next(waiting: deque[Job]) -> Job | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None


__all__ = ["Job", "Lanes"]

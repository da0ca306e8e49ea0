"""Work in the background for a caller that may lose interest in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextvars import copy_context
from typing import Generic, TypeVar

from kvtier.tier.client import TierClient

Result = TypeVar("Result")


class Fetch(Generic[Result]):
    """Work under way. done: whether `result` is final. Written by one thread, read by another.

    needs:   names of blobs that the work asks for; called in the background, at most once.
    took_s:  how long the work ran, without waiting for its turn or for what was on its way.
    context: of who made this, which the work runs in.
    """

    def __init__(
        self,
        work: Callable[[TierClient], Result],
        needs: Callable[[], Iterable[bytes]] | None = None,
    ) -> None:
        self.work, self.needs = work, needs
        self.context = copy_context()
        self.took_s = 0.0
        self.result: Result | None = None
        self.cancelled = False
        self._ended = threading.Event()
        self._unwanted: Callable[[Result], None] | None = None
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def end(self, result: Result | None) -> None:
        with self._lock:
            self.result = result
            self._ended.set()
            unwanted = self._unwanted
        if unwanted is not None and result is not None:
            unwanted(result)

    def wait(self, timeout_s: float) -> bool:
        """Returns `done`, after at most `timeout_s`."""
        return self._ended.wait(timeout_s)

    def cancel(self, unwanted: Callable[[Result], None] | None = None) -> None:
        """The result is not wanted any more; work that has not begun will not.

        unwanted: called once with a result that came or comes all the same.
        """
        with self._lock:
            self.cancelled = True
            self._unwanted = unwanted
            result = self.result if self.done else None
        if unwanted is not None and result is not None:
            unwanted(result)


__all__ = ["Fetch", "Result"]

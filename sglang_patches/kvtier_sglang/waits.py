"""A request's wait for an answer that is fetched in the background."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvtier.tier.link.queues import Fetch
from kvtier_sglang.ranks import Answer

T = TypeVar("T")

_numbers: Iterator[int] = itertools.count()


@dataclass
class Wait(ABC, Generic[T]):
    """The wait of one request for one answer, which all ranks have or none (ranks.Awaited).

    fetch:    brings this rank's part; its result is None where there is none.
    deadline: time.monotonic() when it is given up.
    arrived:  whether all ranks have their part; None until they have resolved that.
    number:   grows from wait to wait. So it tells in which order they were asked for, which is the
              same on every rank; a clock would not, where it stands still on one rank alone.

    Scheduler thread only.
    """

    fetch: Fetch[T | None]
    deadline: float
    arrived: bool | None = field(default=None, init=False)
    number: int = field(default_factory=lambda: next(_numbers), init=False)

    @abstractmethod
    def describe(self, result: T) -> object:
        """Return what describes this rank's part: equal where the ranks' parts fit."""

    @abstractmethod
    def release(self, result: T) -> None:
        """Give back what a result holds."""

    @property
    def answer(self) -> object:
        """This rank's answer, see ranks.Awaited."""
        # It is looked at once: it may be done at any moment, and would be lost between two looks.
        if not self.fetch.done:
            return Answer.LOST if time.monotonic() >= self.deadline else Answer.AWAITED
        result = self.fetch.result
        return Answer.LOST if result is None else self.describe(result)

    def resolve(self, *, arrived: bool) -> None:
        """Note whether all ranks have their parts, see ranks.Awaited."""
        self.arrived = arrived

    @property
    def result(self) -> T | None:
        """The part that arrived, still the wait's to release; None where not all ranks have one."""
        return self.fetch.result if self.arrived else None

    def cancel(self) -> None:
        """Let go of an answer that is not wanted (any more)."""

        def unwanted(result: T | None) -> None:
            if result is not None:
                self.release(result)

        self.fetch.cancel(unwanted)


__all__ = ["Wait"]

"""A request's wait for an answer that is fetched in the background."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Generic, TypeVar

from kvtier.tier.link.queues import Fetch
from kvtier_sglang.ranks import Ranks

T = TypeVar("T")

_numbers: Iterator[int] = itertools.count()


class Answer(Enum):
    """The state of an answer that all ranks wait for, on a rank that has none."""

    AWAITED = auto()
    LOST = auto()


@dataclass
class Wait(ABC, Generic[T]):
    """The wait of one request for one answer, which all ranks have or none.

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
        """An `Answer`, or what describes this rank's part that arrived."""
        # It is looked at once: it may be done at any moment, and would be lost between two looks.
        if not self.fetch.done:
            return Answer.LOST if time.monotonic() >= self.deadline else Answer.AWAITED
        result = self.fetch.result
        return Answer.LOST if result is None else self.describe(result)

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


def resolve_all(pending: Sequence[Wait[Any]], ranks: Ranks) -> None:
    """Resolve the waits that no rank goes on with: what all have and is the same arrived; what any
    has lost is lost to all. pending: the same ones in the same order on every rank."""
    if not pending:
        return
    told = ranks.every([one.answer for one in pending])
    for one, *answers in zip(pending, *told, strict=True):
        if Answer.LOST in answers:
            one.arrived = False
        elif Answer.AWAITED not in answers:
            one.arrived = all(answer == answers[0] for answer in answers)

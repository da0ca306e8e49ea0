"""The interface of a share rule: it says how much of a finished turn CA heads keep.

    turn's prompt   [ sink | droppable ………………………… | recent ]
    shares, budgets   count the whole prompt: what is protected anyway is paid from them first
    curves            count the droppable tokens alone, so that one curve fits every length

A rule is a frozen dataclass, made from one number that users choose. The engine, the check of what
comes back from the tier, the bench and the tests use it alike. docs/extending.md writes one, from
its file to the running server.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, NamedTuple, Protocol, Self

PAGE = 16
"""Entries of one KV head that lie together in memory: what is kept fills whole pages."""
CODED_PAGES = {"int8": 28, "int4": 56, "int3": 63}
"""The same where they are coded, by what to, of heads of 64 numbers or more
(kvtier_kernels.codes.coded_shape, which needs torch)."""


@dataclass(frozen=True)
class Turn:
    """A finished turn, as far as it is known when its share is decided.

    prompt_tokens:    of this turn alone
    droppable_tokens: of them, those that no rule protects; at least 1
    held_tokens:      CA entries that the turns before it keep
    nll:              token-mean negative log-likelihood of the prompt in nats, None if not measured
    """

    prompt_tokens: int
    droppable_tokens: int
    held_tokens: int = 0
    nll: float | None = None

    @property
    def protected_tokens(self) -> int:
        return self.prompt_tokens - self.droppable_tokens


@dataclass(frozen=True)
class Choice:
    """The number of tokens of a turn that stay, and why.

    kept_tokens: of the droppable ones, 1 … all
    reason:      what metrics count the turn under, in a few words with dashes
    quality:     what the curve predicts for them
    """

    kept_tokens: int
    reason: str
    nll: float | None = None
    quality: float | None = None


class CurveLike(Protocol):
    """The two directions of a calibration curve; see kvtier.calibration.curves.Curve."""

    def quality(self, retention: float, nll: float) -> float: ...

    def retention(self, quality: float, nll: float) -> float: ...


class CurveSource(Protocol):
    """The source of the curve in force; it may change between two calls."""

    def curve(self) -> CurveLike | None: ...


class Serving(NamedTuple):
    """The facts of a server that a rule may need.

    entry_bytes: device bytes of one CA entry over all layers
    source:      of calibration curves; there for rules with `needs_curve`
    """

    entry_bytes: int
    source: CurveSource | None = None


class Number(Enum):
    """The kind of number that a rule is made from."""

    SHARE = "a number in (0, 1]"
    COUNT = "a whole number of at least 1"

    def allows(self, number: float) -> bool:
        if self is Number.SHARE:
            return 0 < number <= 1
        return number >= 1 and float(number).is_integer()


@dataclass(frozen=True)
class ShareRule(ABC):
    """Decides the share of one finished turn. Called on the scheduler thread: never blocks.

    name:        what users choose it by
    takes:       what kind of number it is made from
    setting:     that it has for itself; one without is asked for as `share_rule = NAME=NUMBER`
    needs_curve: whether it reads a calibration curve
    needs_nll:   whether `Turn.nll` is read at all
    """

    name: ClassVar[str]
    takes: ClassVar[Number]
    setting: ClassVar[str | None] = None
    needs_curve: ClassVar[bool] = False
    needs_nll: ClassVar[bool] = False

    @classmethod
    def expected_share(cls, number: float) -> float:
        """The share that plans count with."""
        return 1.0

    @classmethod
    def of(cls, number: float, serving: Serving) -> Self:
        """The rule with a number of the kind that it takes."""
        raise NotImplementedError(f"{cls.__name__} is no rule that a server is given")

    @abstractmethod
    def choose(self, turn: Turn) -> Choice:
        """Choose how many of this turn's droppable tokens CA heads keep."""

    def bounds(self, turn: Turn, most_held: int) -> tuple[int, int]:
        """The fewest and the most entries that this rule may have kept of an earlier turn, of which
        neither the NLL is known any more nor exactly what was held before it: from
        `turn.held_tokens` to `most_held` entries. This one is for a rule that keeps no more the
        more is held, and does not look at the NLL."""
        most = self.choose(turn).kept_tokens
        return self.choose(replace(turn, held_tokens=most_held)).kept_tokens, most


def whole_pages(kept_tokens: int, droppable_tokens: int, page: int = PAGE) -> int:
    """The fewest entries, at least `kept_tokens`, that fill whole pages of so many: one page or
    more, but at most all `droppable_tokens`."""
    return min(max(1, -(-kept_tokens // page)) * page, droppable_tokens)


def profile_slots(kept: int, anchored: int, heads: int, page: int = PAGE, windowed: int = 0) -> int:
    """Return the number of slots of all heads that hold a span of which the anchored heads keep so
    many entries each, in pages of so many, those of layers with a window nothing, and every other
    head one page."""
    pages = anchored * -(-kept // page) + heads - anchored - windowed
    return PAGE * -(-pages // heads)


def within(turn: Turn, kept_tokens: int) -> int:
    """The nearest that may be kept of a turn's droppable tokens."""
    return whole_pages(kept_tokens, turn.droppable_tokens)


def share_of(share: float, tokens: int) -> int:
    """A share of some tokens in whole ones, never undercut by rounding."""
    return math.ceil(share * tokens - 1e-9)

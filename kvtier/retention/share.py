"""How much of a context its CA heads keep.

One rule per server: everything, a fixed share, an absolute budget, or whatever a quality target
allows this very context, read from the model's calibration curve at the context's own NLL.

    turn's prompt   [ sink | droppable ………………………… | recent ]
    shares, budgets   count the whole prompt: what is protected anyway is paid from them first
    curves            count the droppable tokens alone, so that one curve fits every length

Without a curve, or without an NLL, everything is kept: a doubt never costs an answer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol

Reason = Literal["everything", "share", "budget", "quality", "no-curve", "no-nll"]
"""Why a context kept what it kept; the keys of the engine's counters."""


@dataclass(frozen=True)
class Turn:
    """What is known of a finished turn when its share is decided.

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
    """kept_tokens: of the droppable ones, 1 … all. quality: what the curve predicts for them."""

    kept_tokens: int
    reason: Reason
    nll: float | None = None
    quality: float | None = None


def _within(turn: Turn, kept_tokens: int) -> int:
    return min(max(kept_tokens, 1), turn.droppable_tokens)


def _share_of(share: float, tokens: int) -> int:
    """Never undercut by rounding."""
    return math.ceil(share * tokens - 1e-9)


class CurveLike(Protocol):
    """The two directions of a calibration curve; see kvtier.calibration.curves.Curve."""

    def quality(self, retention: float, nll: float) -> float: ...

    def retention(self, quality: float, nll: float) -> float: ...


class ShareRule(ABC):
    """Decides the share of one finished turn. Called on the scheduler thread: never blocks.

    needs_nll: whether `Turn.nll` is read at all
    """

    needs_nll: ClassVar[bool] = False

    @abstractmethod
    def choose(self, turn: Turn) -> Choice:
        """How many of this turn's droppable tokens CA heads keep."""

    def bounds(self, turn: Turn, most_held: int) -> tuple[int, int]:
        """The fewest and the most entries that this rule may have kept of an earlier turn, of which
        neither the NLL is known any more nor exactly what was held before it: from
        `turn.held_tokens` to `most_held` entries."""
        most = self.choose(turn).kept_tokens
        return self.choose(replace(turn, held_tokens=most_held)).kept_tokens, most


class Everything(ShareRule):
    """Keep the whole context."""

    def choose(self, turn: Turn) -> Choice:
        return Choice(turn.droppable_tokens, "everything", turn.nll)


@dataclass(frozen=True)
class FixedShare(ShareRule):
    """Keep the same share of every prompt, in (0, 1], and never less than is protected."""

    share: float

    def choose(self, turn: Turn) -> Choice:
        wanted = _share_of(self.share, turn.prompt_tokens) - turn.protected_tokens
        return Choice(_within(turn, wanted), "share", turn.nll)


@dataclass(frozen=True)
class TokenBudget(ShareRule):
    """Keep at most `tokens` CA entries of a whole session, oldest turns first.

    A turn keeps its protected tokens and one more even where nothing is left.
    """

    tokens: int

    def choose(self, turn: Turn) -> Choice:
        left = self.tokens - turn.held_tokens - turn.protected_tokens
        return Choice(_within(turn, left), "budget", turn.nll)


class CurveSource(Protocol):
    """Where the curve in force comes from; it may change between two calls."""

    def curve(self) -> CurveLike | None: ...


@dataclass(frozen=True)
class QualityTarget(ShareRule):
    """Keep as little as the curve allows under a quality target in (0, 1]."""

    target: float
    source: CurveSource
    needs_nll: ClassVar[bool] = True

    def choose(self, turn: Turn) -> Choice:
        curve = self.source.curve()
        if curve is None:
            return Choice(turn.droppable_tokens, "no-curve", turn.nll)
        if turn.nll is None:
            return Choice(turn.droppable_tokens, "no-nll")
        share = curve.retention(self.target, turn.nll)
        kept = _within(turn, _share_of(share, turn.droppable_tokens))
        predicted = curve.quality(kept / turn.droppable_tokens, turn.nll)
        return Choice(kept, "quality", turn.nll, predicted)

    def bounds(self, turn: Turn, most_held: int) -> tuple[int, int]:
        """As little as the curve in force asks of any NLL, as much as there is: then there may have
        been no curve. Without one now, nothing is known."""
        curve = self.source.curve()
        if curve is None:
            return 1, turn.droppable_tokens
        # A curve takes an NLL outside of what was measured as the nearer end.
        share = min(curve.retention(self.target, nll) for nll in (0.0, math.inf))
        return _within(turn, _share_of(share, turn.droppable_tokens)), turn.droppable_tokens

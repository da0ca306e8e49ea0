"""How much of a context its CA heads keep.

One rule per server: everything, a fixed share, an absolute budget, or whatever a quality target
allows this very context, read from the model's calibration curve at the context's own NLL:

    r* = ln(1 + τ (e^b − 1)) / b,    b = α n + β        (kvtier.calibration.curves)

A share counts every token of a turn's prompt, the protected ones (sink and recent) included.
Without a curve, or without an NLL, everything is kept: a doubt never costs an answer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

Reason = Literal["everything", "share", "budget", "quality", "no-curve", "no-nll"]
"""Why a context kept what it kept; the keys of the engine's counters."""


@dataclass(frozen=True)
class Turn:
    """What is known of a finished turn when its share is decided.

    prompt_tokens: of this turn alone
    held_tokens:   CA entries that the turns before it keep
    nll:           token-mean negative log-likelihood of the prompt in nats, None if not measured
    """

    prompt_tokens: int
    held_tokens: int = 0
    nll: float | None = None


@dataclass(frozen=True)
class Choice:
    """retention: share of the prompt kept, in (0, 1]. quality: what the curve predicts there."""

    retention: float
    reason: Reason
    nll: float | None = None
    quality: float | None = None

    def tokens(self, prompt_tokens: int) -> int:
        """CA entries the prompt may keep; the share is never undercut by rounding."""
        return math.ceil(self.retention * prompt_tokens - 1e-9)


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
        """The share of this turn's prompt that CA heads keep."""


class Everything(ShareRule):
    """Keep the whole context."""

    def choose(self, turn: Turn) -> Choice:
        return Choice(1.0, "everything", turn.nll)


@dataclass(frozen=True)
class FixedShare(ShareRule):
    """Keep the same share of every context, in (0, 1]."""

    share: float

    def choose(self, turn: Turn) -> Choice:
        return Choice(self.share, "share", turn.nll)


@dataclass(frozen=True)
class TokenBudget(ShareRule):
    """Keep at most `tokens` CA entries of a whole session, oldest turns first."""

    tokens: int

    def choose(self, turn: Turn) -> Choice:
        left = max(1, self.tokens - turn.held_tokens)
        return Choice(min(1.0, left / turn.prompt_tokens), "budget", turn.nll)


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
            return Choice(1.0, "no-curve", turn.nll)
        if turn.nll is None:
            return Choice(1.0, "no-nll")
        share = curve.retention(self.target, turn.nll)
        return Choice(share, "quality", turn.nll, curve.quality(share, turn.nll))

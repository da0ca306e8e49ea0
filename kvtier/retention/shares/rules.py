"""The share rules that kvtier brings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from kvtier.retention.shares.base import (
    PAGE,
    Choice,
    CurveSource,
    Number,
    Serving,
    ShareRule,
    Turn,
    share_of,
    within,
)


class Everything(ShareRule):
    """Keep the whole context. No setting names it: it is what the others are chosen instead of."""

    name: ClassVar[str] = "everything"

    def choose(self, turn: Turn) -> Choice:
        return Choice(turn.droppable_tokens, self.name, turn.nll)


@dataclass(frozen=True)
class FixedShare(ShareRule):
    """Fixed share: every prompt keeps the same share, and never less than what is protected.

    share: of every prompt, in (0, 1]
    """

    name: ClassVar[str] = "retention"
    takes: ClassVar[Number] = Number.SHARE
    setting: ClassVar[str | None] = "retention"

    share: float

    @classmethod
    def expected_share(cls, number: float) -> float:
        return number

    @classmethod
    def of(cls, number: float, serving: Serving) -> FixedShare:
        return cls(number)

    def choose(self, turn: Turn) -> Choice:
        wanted = share_of(self.share, turn.prompt_tokens) - turn.protected_tokens
        return Choice(within(turn, wanted), "share", turn.nll)


@dataclass(frozen=True)
class AtMost(ShareRule):
    """The rule of a server for one session that asks to keep less. It is no rule that a server is
    given.

    rule: the server's; share: of every prompt, in (0, 1]
    """

    rule: ShareRule
    share: float

    def choose(self, turn: Turn) -> Choice:
        choice, limit = self.rule.choose(turn), self._limit(turn)
        if choice.kept_tokens <= limit:
            return choice
        return Choice(limit, "asked", choice.nll)

    def bounds(self, turn: Turn, most_held: int) -> tuple[int, int]:
        limit = self._limit(turn)
        least, most = self.rule.bounds(turn, most_held)
        return min(least, limit), min(most, limit)

    def _limit(self, turn: Turn) -> int:
        return FixedShare(self.share).choose(turn).kept_tokens


@dataclass(frozen=True)
class QualityTarget(ShareRule):
    """Quality target: a context keeps as little as its calibration curve allows at its own NLL.

    Without a curve, or without an NLL, everything is kept: a doubt never costs an answer.

    target: quality in (0, 1]; source: of the curve in force
    """

    name: ClassVar[str] = "quality"
    takes: ClassVar[Number] = Number.SHARE
    setting: ClassVar[str | None] = "quality"
    needs_curve: ClassVar[bool] = True
    needs_nll: ClassVar[bool] = True

    target: float
    source: CurveSource

    @classmethod
    def of(cls, number: float, serving: Serving) -> QualityTarget:
        assert serving.source is not None, "a quality target needs a source of curves"
        return cls(number, serving.source)

    def choose(self, turn: Turn) -> Choice:
        curve = self.source.curve()
        if curve is None:
            return Choice(turn.droppable_tokens, "no-curve", turn.nll)
        if turn.nll is None:
            return Choice(turn.droppable_tokens, "no-nll")
        share = curve.retention(self.target, turn.nll)
        kept = within(turn, share_of(share, turn.droppable_tokens))
        predicted = curve.quality(kept / turn.droppable_tokens, turn.nll)
        return Choice(kept, "quality", turn.nll, predicted)

    def bounds(self, turn: Turn, most_held: int) -> tuple[int, int]:
        """Return as little as the curve in force asks of any NLL, and as much as there is, because
        there may have been no curve then. Without one now, nothing is known."""
        curve = self.source.curve()
        if curve is None:
            return 1, turn.droppable_tokens
        # A curve takes an NLL outside of what was measured as the nearer end.
        share = min(curve.retention(self.target, nll) for nll in (0.0, math.inf))
        return within(turn, share_of(share, turn.droppable_tokens)), turn.droppable_tokens


@dataclass(frozen=True)
class TokenBudget(ShareRule):
    """Token budget: a whole session keeps at most so many entries, oldest turns first.

    tokens: CA entries of the prompts of a session. A turn keeps its protected tokens and one more
    even where nothing is left.
    """

    name: ClassVar[str] = "budget-tokens"
    takes: ClassVar[Number] = Number.COUNT
    setting: ClassVar[str | None] = "budget.tokens"

    tokens: int

    @classmethod
    def of(cls, number: float, serving: Serving) -> Self:
        return cls(int(number))

    def choose(self, turn: Turn) -> Choice:
        left = self.tokens - turn.held_tokens - turn.protected_tokens
        # A page that the budget does not hold is not begun.
        return Choice(within(turn, left // PAGE * PAGE), "budget", turn.nll)


@dataclass(frozen=True)
class ByteBudget(TokenBudget):
    """Byte budget: a token budget of as many entries as fit into so many bytes of device memory,
    over all layers; at least one."""

    name: ClassVar[str] = "budget-bytes"
    setting: ClassVar[str | None] = "budget.bytes"

    @classmethod
    def of(cls, number: float, serving: Serving) -> Self:
        return cls(max(1, int(number) // max(1, serving.entry_bytes)))

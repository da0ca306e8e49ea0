"""Quality target: a context keeps as little as its calibration curve allows at its own NLL.

Without a curve, or without an NLL, everything is kept: a doubt never costs an answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvtier.retention.shares.base import (
    Choice,
    CurveSource,
    Number,
    Serving,
    ShareRule,
    Turn,
    share_of,
    within,
)

if TYPE_CHECKING:
    from kvtier.config import Settings


@dataclass(frozen=True)
class QualityTarget(ShareRule):
    """target: quality in (0, 1]; source: of the curve in force"""

    name: ClassVar[str] = "quality"
    takes: ClassVar[Number] = Number.SHARE
    needs_curve: ClassVar[bool] = True
    needs_nll: ClassVar[bool] = True

    target: float
    source: CurveSource

    @classmethod
    def own_setting(cls, settings: Settings) -> float | None:
        return settings.quality

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

"""Token budget: a whole session keeps at most so many entries, oldest turns first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from kvtier.retention.shares.base import PAGE, Choice, Number, Serving, ShareRule, Turn, within

if TYPE_CHECKING:
    from kvtier.config import Settings


@dataclass(frozen=True)
class TokenBudget(ShareRule):
    """tokens: CA entries of the prompts of a session. A turn keeps its protected tokens and one
    more even where nothing is left."""

    name: ClassVar[str] = "budget-tokens"
    takes: ClassVar[Number] = Number.COUNT

    tokens: int

    @classmethod
    def own_setting(cls, settings: Settings) -> float | None:
        return settings.budget.tokens

    @classmethod
    def of(cls, number: float, serving: Serving) -> Self:
        return cls(int(number))

    def choose(self, turn: Turn) -> Choice:
        left = self.tokens - turn.held_tokens - turn.protected_tokens
        # A page that the budget does not hold is not begun.
        return Choice(within(turn, left // PAGE * PAGE), "budget", turn.nll)

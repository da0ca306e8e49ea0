"""Everything: what CA heads keep where no rule is asked for."""

from __future__ import annotations

from kvtier.retention.shares.base import Choice, Serving, ShareRule, Turn


class Everything(ShareRule):
    """Keep the whole context. No setting names it: it is what the others are chosen instead of."""

    name = "everything"

    @classmethod
    def of(cls, number: float, serving: Serving) -> Everything:
        return cls()

    def choose(self, turn: Turn) -> Choice:
        return Choice(turn.droppable_tokens, "everything", turn.nll)

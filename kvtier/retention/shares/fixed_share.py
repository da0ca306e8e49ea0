"""Fixed share: every prompt keeps the same share, and never less than what is protected. At most a
share: what another rule keeps, but no more than that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvtier.retention.shares.base import (
    Choice,
    Number,
    Serving,
    ShareRule,
    Turn,
    share_of,
    within,
)
from kvtier.retention.shares.everything import Everything

if TYPE_CHECKING:
    from kvtier.config import Settings


@dataclass(frozen=True)
class FixedShare(ShareRule):
    """share: of every prompt, in (0, 1]"""

    name: ClassVar[str] = "retention"
    takes: ClassVar[Number] = Number.SHARE

    share: float

    @classmethod
    def own_setting(cls, settings: Settings) -> float | None:
        return settings.retention

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

    name: ClassVar[str] = "at-most"
    takes: ClassVar[Number] = Number.SHARE

    rule: ShareRule
    share: float

    @classmethod
    def of(cls, number: float, serving: Serving) -> AtMost:
        return cls(Everything(), number)

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

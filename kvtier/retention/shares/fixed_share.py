"""Fixed share: every prompt keeps the same share, and never less than what is protected."""

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

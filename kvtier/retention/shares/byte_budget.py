"""Byte budget: a token budget of as many entries as fit into so many bytes of device memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from kvtier.retention.shares.base import Serving
from kvtier.retention.shares.token_budget import TokenBudget

if TYPE_CHECKING:
    from kvtier.config import Settings


@dataclass(frozen=True)
class ByteBudget(TokenBudget):
    """A token budget like its base, which counts the entries that the bytes hold over all layers;
    at least one."""

    name: ClassVar[str] = "budget-bytes"

    @classmethod
    def own_setting(cls, settings: Settings) -> float | None:
        return settings.budget.bytes

    @classmethod
    def of(cls, number: float, serving: Serving) -> Self:
        return cls(max(1, int(number) // max(1, serving.entry_bytes)))

"""The results of a forward pass's lookups, request by request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kvtier_kernels.memory.base import MemoryAnswer, MemoryLayer


class Lookups(NamedTuple):
    """The lookups of one request's prompt, or of a part of it.

    asked:  how many there were, in all layers
    fell:   of those, that no entry was near enough to
    margin: the nearest entries' cosines less what is near enough, added up
    """

    asked: int = 0
    fell: int = 0
    margin: float = 0.0

    def plus(self, other: Lookups) -> Lookups:
        """Return the lookups of both parts."""
        return Lookups(self.asked + other.asked, self.fell + other.fell, self.margin + other.margin)


@dataclass
class PassLookups:
    """The lookups of an extend pass, over all layers so far, on the device.

    rids, counts: the requests and their new tokens
    """

    rids: list[str]
    counts: list[int]
    # Float32 [3, tokens]: as in Lookups.
    _sums: torch.Tensor | None = field(default=None, repr=False)

    def add(self, answer: MemoryAnswer, ids: torch.Tensor, layer: MemoryLayer) -> None:
        """One layer's answers to the tokens of these memories. A memory without entries there is
        not asked."""
        own = ids.clamp_min(0).long()
        asked = (ids >= 0) & (layer.key_indptr.diff() > 0)[own]
        fell = asked & (answer.entry < 0)
        margin = torch.where(asked, answer.cosine - layer.nearness[own], 0.0)
        sums = torch.stack([asked.float(), fell.float(), margin.float()])
        self._sums = sums if self._sums is None else self._sums + sums

    def by_request(self) -> dict[str, Lookups]:
        """Return the lookups of each request that made some. Waits for the device."""
        if self._sums is None:
            return {}
        parts = torch.split(self._sums.cpu().double(), self.counts, dim=1)
        found = {
            rid: Lookups(int(asked), int(fell), float(margin))
            for rid, (asked, fell, margin) in zip(
                self.rids, (part.sum(1) for part in parts), strict=True
            )
        }
        return {rid: lookups for rid, lookups in found.items() if lookups.asked}


__all__ = ["Lookups", "PassLookups"]

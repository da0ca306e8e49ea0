"""Attention mass: the heads that look at the middle most, over all layers.

ContextKeeper's equation 1 without its votes (`kvtier.heads.methods.contextkeeper`): there every
layer has its candidates, here one layer may keep all of its heads and another none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.heads.methods.base import HeadMethod, HeadScores
from kvtier.heads.methods.contextkeeper import ContextKeeper
from kvtier.heads.progress import Progress, no_progress

if TYPE_CHECKING:
    from kvtier.heads.probes.context import ProbeBatch


class AttentionMass(HeadMethod):
    """Mean attention mass on the middle."""

    name = "attention-mass"

    def score(self, batches: Sequence[ProbeBatch], progress: Progress = no_progress) -> HeadScores:
        """Mean attention mass on the middle, per sample and over all, in [0, 1]."""
        return ContextKeeper().score(batches, progress)

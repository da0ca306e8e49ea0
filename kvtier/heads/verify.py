"""What a profile costs, measured: recall on samples that no choice was made on.

The control is the same number of heads drawn at random: a profile that does not beat it has found
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.errors import UsageError
from kvtier.heads.base import Progress, no_progress
from kvtier.heads.probe import ProbeBatch, Quality, measure
from kvtier.heads.profile import HeadProfile, MeasuredCost, random_profile, window_profile

RANDOM_DRAWS = 5


@dataclass(frozen=True)
class Verification:
    """Measurements at one context length.

    random:  mean over draws of equally many random heads
    window:  no head keeps the middle
    answers: answers judged in each of them
    """

    context_tokens: int
    answers: int
    full: Quality
    profile: Quality
    random: Quality
    window: Quality

    def costs(self) -> tuple[MeasuredCost, ...]:
        """As a profile carries them: whole answers, answer tokens, loss."""
        names = {"recall": "recall", "tokens": "token recall", "loss": "nll"}
        return tuple(
            MeasuredCost(
                metric=name,
                full=getattr(self.full, attribute),
                profile=getattr(self.profile, attribute),
                samples=self.answers,
                context_tokens=self.context_tokens,
            )
            for attribute, name in names.items()
        )

    def control(self) -> dict[str, Any]:
        """The control's measurements, for the profile's parameters."""
        return {
            "context_tokens": self.context_tokens,
            "random_recall": self.random.recall,
            "random_token_recall": self.random.tokens,
            "random_nll": self.random.loss,
            "window_recall": self.window.recall,
        }


def verify(
    batches: Sequence[ProbeBatch],
    profile: HeadProfile,
    seed: int,
    draws: int = RANDOM_DRAWS,
    progress: Progress = no_progress,
) -> Verification:
    """Measure `profile` and its controls on batches of one context length.

    Raises HeadProfileMismatchError when the profile is for another shape of model.
    """
    lengths = {batch.context_tokens for batch in batches}
    if len(lengths) != 1 or draws < 1:
        raise UsageError("batches", "samples of one context length", sorted(lengths))
    probe = batches[0].probe
    controls = [random_profile(probe.shape, profile.num_ca_heads, seed + i) for i in range(draws)]
    masks = [probe.full(), probe.mask(profile), probe.mask(window_profile(probe.shape))]
    masks += [probe.mask(control) for control in controls]
    found = []
    for done, mask in enumerate(masks):
        progress("verification", done, len(masks))
        found.append(measure(batches, mask))
    progress("verification", len(masks), len(masks))
    full, kept, window, *drawn = found
    random = Quality(*(sum(column) / draws for column in zip(*drawn, strict=True)))
    return Verification(
        context_tokens=lengths.pop(),
        answers=sum(len(batch.sample.questions) for batch in batches),
        full=full,
        profile=kept,
        random=random,
        window=window,
    )

"""The cost of a profile, measured: recall on samples that no choice was made on.

The control is the same number of heads drawn at random: a profile that does not beat it has found
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvtier.heads.probes.context import ProbeBatch
from kvtier.heads.probes.quality import Kept, Quality, kept_worth, mean_quality
from kvtier.heads.profile import HeadProfile, MeasuredCost, random_profile, window_profile
from kvtier.heads.progress import Progress, each, no_progress

RANDOM_DRAWS = 5


@dataclass(frozen=True)
class Verification:
    """Measurements at one context length, or at the mean of the samples' own lengths.

    random:  mean over draws of equally many random heads
    window:  no head keeps the middle
    answers: answers judged in each of them
    tasks:   the same of each task alone, where there are several
    """

    context_tokens: int
    answers: int
    full: Quality
    profile: Quality
    random: Quality
    window: Quality
    tasks: Mapping[str, Verification] = field(default_factory=dict)

    @property
    def worth(self) -> float:
        """The share that is kept of what the context is worth: see `kept_worth`."""
        return kept_worth(self.full, self.profile, self.window)

    def costs(self) -> tuple[MeasuredCost, ...]:
        """Return the costs as a profile carries them: whole answers, answer tokens, loss."""
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


def verify(
    batches: Sequence[ProbeBatch],
    profile: HeadProfile,
    seed: int,
    progress: Progress = no_progress,
) -> Verification:
    """Measure a profile. Samples of different lengths are reported at their mean length.

    Raises HeadProfileMismatchError when the profile is for another shape of model.
    """
    probe = batches[0].probe
    drawn = [
        random_profile(probe.shape, profile.num_ca_heads, seed + draw)
        for draw in range(RANDOM_DRAWS)
    ]
    masks_of = {
        "full": [probe.full()],
        "window": [probe.mask(window_profile(probe.shape))],
        "profile": [probe.mask(profile)],
        "random": [probe.mask(one) for one in drawn],
    }
    masks = list(dict.fromkeys(mask for group in masks_of.values() for mask in group))
    found = {
        mask: [batch.quality(mask) for batch in batches]
        for mask in each(masks, "verification", progress)
    }
    rows_of: dict[str, list[int]] = {}
    for index, batch in enumerate(batches):
        rows_of.setdefault(batch.sample.task, []).append(index)
    overall = _of_samples(batches, found, masks_of, range(len(batches)))
    if len(rows_of) == 1:
        return overall
    tasks = {t: _of_samples(batches, found, masks_of, rows) for t, rows in rows_of.items()}
    return replace(overall, tasks=tasks)


def _of_samples(
    batches: Sequence[ProbeBatch],
    found: Mapping[Kept, Sequence[Quality]],
    masks_of: Mapping[str, Sequence[Kept]],
    rows: Sequence[int],
) -> Verification:
    """Measurements of some of the samples."""
    chosen = [batches[i] for i in rows]

    def of(name: str) -> Quality:
        masks = masks_of[name]
        return mean_quality(chosen * len(masks), [found[mask][i] for mask in masks for i in rows])

    return Verification(
        context_tokens=round(sum(batch.context_tokens for batch in chosen) / len(chosen)),
        answers=sum(len(batch.sample.questions) for batch in chosen),
        full=of("full"),
        profile=of("profile"),
        random=of("random"),
        window=of("window"),
    )

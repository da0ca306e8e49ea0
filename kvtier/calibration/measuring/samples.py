"""Contexts to fit a curve on: from filler that hides little to text where every word counts.

A curve learns how much a text of a given NLL can lose, so its samples must differ in just that.
The recall language does so by how many facts a context holds; other models get the real text of
`kvtier.heads.samples`, or the user's own, which is always the better sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.errors import UsageError
from kvtier.heads.samples.questions import CalibrationSample, Question
from kvtier.heads.samples.synthetic import make_samples, speaks_recall, tasks_for
from kvtier.synthetic.recall import FACT_TOKENS, MAX_FACTS, make_session

# Facts fill at most this share of a context: the language needs filler between its facts.
DENSEST = 0.7
FEWEST_FACTS = 4
QUESTIONS = 64
STREAM = 2


def curve_samples(
    model_path: str,
    lengths: Sequence[int],
    count: int,
    seed: int,
    tasks: Sequence[str] | None = None,
) -> list[CalibrationSample]:
    """`count` contexts per length; equal arguments give equal samples. tasks: of real text; None
    for all.

    Raises UsageError for a count below 1 and SizeError for contexts that hold no fact.
    """
    if not speaks_recall(model_path):
        known = tasks_for(model_path)
        return make_samples(known.make, tasks or known.measuring, count, lengths, seed, STREAM)
    if count < 1:
        raise UsageError("--samples", "at least 1", count)
    samples = []
    for length in lengths:
        most = min(MAX_FACTS, int(DENSEST * length / FACT_TOKENS))
        for index in range(count):
            rng = np.random.default_rng([seed, STREAM, length, index])
            # Even in the share that facts fill, jittered, so that no density is favoured.
            facts = max(FEWEST_FACTS, round((index + rng.random()) / count * most))
            samples.append(dense_sample(rng, length, facts, f"{facts} facts"))
    return samples


def dense_sample(
    rng: np.random.Generator, context_tokens: int, facts: int, task: str
) -> CalibrationSample:
    """A context of the recall language with exactly so many facts."""
    session = make_session(rng, context_tokens, QUESTIONS, facts, invented_share=0.0)
    questions = tuple(
        Question(turn.prompt_ids, turn.answer_ids, unscored=len(turn.name))
        for turn in session.turns
        if turn.answer_ids is not None
    )
    return CalibrationSample(tuple(session.context_ids.tolist()), questions, task)

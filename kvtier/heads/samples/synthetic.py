"""Calibration samples: long contexts with questions whose answers are known exactly.

The demo model speaks the recall language of `kvtier.synthetic.recall`.  Any other model gets real
text, told with its own tokenizer (`kvtier.heads.samples.text`); a user's own come from a file
(`kvtier.heads.samples.users`).

Held-out samples come from another stream of the same seed, and from the other half of the texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtier.errors import SizeError, UsageError
from kvtier.heads.samples.questions import CalibrationSample, Question
from kvtier.heads.samples.stories import StoryTeller
from kvtier.heads.samples.text import (
    CHOOSING_TASKS,
    TASKS,
    TEXT_TASKS,
    SampleMaker,
    text_maker,
)
from kvtier.reading import read_json
from kvtier.synthetic.frame import frame_of
from kvtier.synthetic.recall import DEFAULT_LANGUAGE, Session, make_session
from kvtier.synthetic.tokenizer import Tokenizer

# Streams of random numbers; a curve is fitted on the third.
CALIBRATION, HELD_OUT, JUDGING = 0, 1, 3


def make_samples(
    maker: SampleMaker, tasks: Sequence[str], count: int, lengths: Sequence[int], seed: int,
    stream: int = CALIBRATION,
) -> list[CalibrationSample]:  # fmt: skip
    """`count` samples per context length, the tasks in turn; equal arguments give equal samples.

    Raises UsageError for a count below 1 and SizeError for contexts that hold no fact.
    """
    if count < 1:
        raise UsageError("--samples", "at least 1", count)
    samples = []
    for length in lengths:
        for index in range(count):
            rng = np.random.default_rng([seed, stream, length, index])
            half = int(stream == HELD_OUT)
            samples.append(maker(rng, length, tasks[index % len(tasks)], half))
    return samples


class Tasks(NamedTuple):
    """The tasks that a model can be asked: how samples are made, and of which tasks.

    choosing:   tasks that heads are chosen on
    measuring:  tasks that a choice is measured on, those among them
    """

    make: SampleMaker
    choosing: tuple[str, ...]
    measuring: tuple[str, ...]


def tasks_for(model_path: str) -> Tasks:
    """The tasks that fit a model's tokenizer. Raises UsageError when it has none."""
    if speaks_recall(model_path):
        return Tasks(recall_sample, RECALL_TASKS, RECALL_TASKS)
    return Tasks(text_maker_for(model_path), CHOOSING_TASKS, TEXT_TASKS)


def text_maker_for(model_path: str, tellers: Mapping[str, StoryTeller] = TASKS) -> SampleMaker:
    """Samples in real text for a model's tokenizer, `tellers` by task. Raises UsageError when the
    model has none."""
    tokenizer = Tokenizer(model_path)
    # A chat template writes BOS itself.
    first = () if tokenizer.has_chat_template else tokenizer.first_ids
    return text_maker(tokenizer.encode, first, frame_of(tokenizer), tellers)


def speaks_recall(model_path: str) -> bool:
    """Return whether the model's tokenizer is the recall language's, word for word."""
    try:
        document = read_json(Path(model_path) / "tokenizer.json", "--model-path", finite=False)
        return bool(document["model"]["vocab"] == dict(DEFAULT_LANGUAGE.ids))
    except (UsageError, KeyError, TypeError):
        return False


RECALL_TASKS = ("recall", "near-miss", "few-codes")
RECALL_QUESTIONS = 16


def recall_sample(
    rng: np.random.Generator, context_tokens: int, task: str, half: int = 0
) -> CalibrationSample:
    """A session of the recall language; every question stands alone. Its words are drawn anew for
    every sample, so that there are no halves.

    task "near-miss": names share their words, so both words must be matched.
    task "few-codes": answers share their words, so the place in an answer must be kept.
    """
    try:
        session = make_session(
            rng, context_tokens, RECALL_QUESTIONS, invented_share=0.0,
            shared_words=task == "near-miss", few_codes=task == "few-codes",
        )  # fmt: skip
    except ValueError as error:
        raise SizeError("--len", "contexts long enough for facts", context_tokens) from error
    return session_sample(session, task)


def session_sample(session: Session, task: str) -> CalibrationSample:
    """A session of the recall language, asked what has a known answer."""
    questions = tuple(
        Question(turn.prompt_ids, turn.answer_ids, unscored=len(turn.name))
        for turn in session.turns
        if turn.answer_ids is not None
    )
    return CalibrationSample(tuple(session.context_ids.tolist()), questions, task)

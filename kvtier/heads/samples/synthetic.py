"""Calibration samples: long contexts with questions whose answers are known exactly.

The demo model speaks the recall language of `kvtier.synthetic.recall`.  Any other model gets small
synthetic texts in English, built with its own tokenizer (`kvtier.heads.samples.english`); a user's
own come from a file (`kvtier.heads.samples.users`).

Held-out samples come from another stream of the same seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvtier.errors import SizeError, UsageError
from kvtier.heads.samples.english import QUESTIONS, TEXT_TASKS, Encode, SampleMaker, text_maker
from kvtier.heads.samples.questions import CalibrationSample, Question
from kvtier.synthetic.recall import DEFAULT_LANGUAGE, make_session
from kvtier.synthetic.tokenizer import Tokenizer

CALIBRATION, HELD_OUT = 0, 1


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
            samples.append(maker(rng, length, tasks[index % len(tasks)]))
    return samples


def maker_for(model_path: str) -> tuple[SampleMaker, tuple[str, ...]]:
    """The sample maker that fits a model's tokenizer, and its tasks."""
    if speaks_recall(model_path):
        return recall_sample, RECALL_TASKS
    return text_maker(*encoder_for(model_path)), TEXT_TASKS


def encoder_for(model_path: str) -> tuple[Encode, list[int]]:
    """The model's tokenizer as a function, and the ids that start every context (often BOS).

    Raises UsageError when the model's directory has no tokenizer.
    """
    tokenizer = Tokenizer(model_path)
    return tokenizer.encode, list(tokenizer.first_ids)


def speaks_recall(model_path: str) -> bool:
    """Whether the model's tokenizer is the recall language's, word for word."""
    try:
        document = json.loads((Path(model_path) / "tokenizer.json").read_text())
        return bool(document["model"]["vocab"] == dict(DEFAULT_LANGUAGE.ids))
    except (OSError, ValueError, KeyError, TypeError):
        return False


RECALL_TASKS = ("recall", "near-miss", "few-codes")


def recall_sample(rng: np.random.Generator, context_tokens: int, task: str) -> CalibrationSample:
    """A session of the recall language; every question stands alone.

    task "near-miss": names share their words, so both words must be matched.
    task "few-codes": answers share their words, so the place in an answer must be kept.
    """
    try:
        session = make_session(
            rng, context_tokens, QUESTIONS, invented_share=0.0,
            shared_words=task == "near-miss", few_codes=task == "few-codes",
        )  # fmt: skip
    except ValueError as error:
        raise SizeError("--len", "contexts long enough for facts", context_tokens) from error
    questions = tuple(
        Question(turn.prompt_ids, turn.answer_ids, unscored=len(turn.name))
        for turn in session.turns
        if turn.answer_ids is not None
    )
    return CalibrationSample(tuple(session.context_ids.tolist()), questions, task)

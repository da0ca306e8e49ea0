"""Calibration samples: long contexts with questions whose answers are known exactly.

The demo model speaks the recall language of `kvtier.bench.recall`.  Any other model gets a small
synthetic text in English, built with its own tokenizer:

    Notes. The code of amber river is 4821 77. The market opened … The code of …
    Question: what is the code of amber river? Answer: The code of amber river is 4821 77

Held-out samples come from another stream of the same seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvtier.bench.recall import DEFAULT_LANGUAGE, make_session
from kvtier.bench.recall_words import ADJECTIVES, NOUNS
from kvtier.errors import SizeError, UsageError
from kvtier.heads.base import CalibrationSample, Question

CALIBRATION, HELD_OUT = 0, 1
QUESTIONS = 16
SampleMaker = Callable[[np.random.Generator, int, str], CalibrationSample]
"""(random numbers, context tokens, task) -> sample."""

Encode = Callable[[str], list[int]]


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
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    first = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    return text_maker(encode, first), TEXT_TASKS


def speaks_recall(model_path: str) -> bool:
    """Whether the model's tokenizer is the recall language's, word for word."""
    try:
        document = json.loads((Path(model_path) / "tokenizer.json").read_text())
        return bool(document["model"]["vocab"] == dict(DEFAULT_LANGUAGE.ids))
    except (OSError, ValueError, KeyError, TypeError):
        return False


RECALL_TASKS = ("recall", "near-miss")


def recall_sample(rng: np.random.Generator, context_tokens: int, task: str) -> CalibrationSample:
    """A session of the recall language; every question stands alone.

    task "near-miss": names share their words, so both words must be matched.
    """
    try:
        session = make_session(
            rng, context_tokens, QUESTIONS, invented_share=0.0, shared_words=task == "near-miss"
        )
    except ValueError as error:
        raise SizeError("--len", "contexts long enough for facts", context_tokens) from error
    questions = tuple(
        Question(turn.prompt_ids, turn.answer_ids, unscored=len(turn.name))
        for turn in session.turns
        if turn.answer_ids is not None
    )
    return CalibrationSample(tuple(session.context_ids.tolist()), questions, task)


TEXT_TASKS = ("key-value", "two-hop")
_FILLER = (
    "The market opened late because of the rain.", "Nobody expected the bridge to hold so long.",
    "A train passed, and the windows shook for a while.", "They counted the chairs twice.",
    "The old map showed a road that no longer exists.", "Someone had left the lights on again.",
    "In spring the valley fills with the sound of water.", "The letter arrived without a stamp.",
)  # fmt: skip
_ASK = "\nQuestion: What is the code of {0}?\nAnswer: The code of {0} is"


def text_maker(encode: Encode, first: Sequence[int]) -> SampleMaker:
    """Samples in English for any tokenizer; `first` starts every context (often BOS).

    task "key-value": `The code of NAME is C`.
    task "two-hop":   `NAME has the same code as OTHER` for half of the names, which are asked.
    """

    def make(rng: np.random.Generator, context_tokens: int, task: str) -> CalibrationSample:
        names = [f"{ADJECTIVES[a]} {NOUNS[n]}" for a, n in _name_pairs(rng, 2 * QUESTIONS)]
        codes = [f" {a} {b}" for a, b in rng.integers(1000, 10000, (len(names), 2))]
        facts = [f" The code of {n} is{c}." for n, c in zip(names, codes, strict=True)]
        asked = list(zip(names, codes, strict=True))
        if task == "two-hop":
            hops = range(QUESTIONS, 2 * QUESTIONS)
            asked = [(names[i], codes[i - QUESTIONS]) for i in hops]
            facts[QUESTIONS:] = [
                f" {names[i]} has the same code as {names[i - QUESTIONS]}." for i in hops
            ]
        context = _weave(rng, [encode(fact) for fact in facts], context_tokens - len(first), encode)
        questions = [
            Question(tuple(encode(_ASK.format(name))), tuple(encode(code)))
            for name, code in asked[:QUESTIONS]
        ]
        return CalibrationSample((*first, *context), tuple(questions), task)

    return make


def _name_pairs(rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    chosen = rng.permutation(len(ADJECTIVES) * len(NOUNS))[:count]
    return [(int(i) // len(NOUNS), int(i) % len(NOUNS)) for i in chosen]


def _weave(
    rng: np.random.Generator, facts: list[list[int]], num_tokens: int, encode: Encode
) -> list[int]:
    """Facts in random order between filler sentences: exactly `num_tokens` ids.

    Raises SizeError when the facts alone are longer.
    """
    room = num_tokens - sum(map(len, facts))
    if room < 0:
        raise SizeError("--len", f"at least {num_tokens - room} tokens", num_tokens)
    filler = [encode(" " + sentence) for sentence in _FILLER]
    pieces = list(facts)
    while room > 0:
        piece = filler[int(rng.integers(len(filler)))][:room]
        pieces.append(piece)
        room -= len(piece)
    return [token for i in rng.permutation(len(pieces)) for token in pieces[i]]

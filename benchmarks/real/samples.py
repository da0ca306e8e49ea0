"""Contexts beside those of the tasks: recorded sessions of agents, and a fact that an edit changes.

    │ system │ user │ assistant │ tool │ assi│stant │ tool │ assistant │ …
    └────────────── context ────────────┘└── prompt ──────┘└─ answer ─┘

The questions of a session ask what the agent said next. Files are those of
kvtier.traffic.transcripts; tools are called as text. A context is cut after so many tokens,
wherever that is. Agents take texts out of their contexts later, results of tools above all. Here
they are texts at fixed places.

    before  │ Remember: the door code is 4821. │ prose │
    now     │ Remember: the door code is 7350. │ prose │ The door code that was said … │ prose │

The question of a changed fact asks what the code is now. The sentence that refers to it stands in
every other context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np

from kvtier.errors import UsageError
from kvtier.heads.samples.questions import CalibrationSample, Question
from kvtier.heads.samples.stories import Asked, Story
from kvtier.heads.samples.synthetic import text_maker_for
from kvtier.heads.samples.text import SampleMaker
from kvtier.synthetic.standard_library import document, sentences
from kvtier.synthetic.tokenizer import Tokenizer
from kvtier.traffic.transcripts import ARGUMENT, Message, read_transcripts, written

TRANSCRIPTS = "transcripts"
# A context's questions are the answers that come next, as far as they begin near its end.
MOST_QUESTIONS, LONGEST_PROMPT, LONGEST_ANSWER = 4, 1024, 256

PLAIN, REFERRED_TO = "changed fact", "changed fact, referred to"
CHANGED_FACTS = (PLAIN, REFERRED_TO)
# So many sentences stand before the one that refers to the fact.
SENTENCES_BEFORE = 10
REFERENCE = " The door code that was said at the beginning is still the one in use."


def of_transcripts(
    file: Path, tokenizer: Tokenizer, length: int, count: int
) -> list[CalibrationSample]:
    """Return the first `count` transcripts that go on behind `length` tokens, cut there.

    Raises UsageError for a file with fewer, and for a model without a chat template.
    """
    if not tokenizer.has_chat_template:
        raise UsageError("--model-path", "a model with a chat template", tokenizer.model_path)
    found: list[CalibrationSample] = []
    for transcript in read_transcripts(file):
        if len(found) == count:
            break
        sample = _cut(transcript.messages, tokenizer, length)
        if sample is not None:
            found.append(sample)
    if len(found) < count:
        expected = f"{count} transcripts that go on behind {length} tokens"
        raise UsageError(ARGUMENT, expected, f"{file}: {len(found)}")
    return found


def elided(
    sample: CalibrationSample, places: Sequence[float], tokens: int
) -> tuple[CalibrationSample, list[int]]:
    """Return the sample with `tokens` taken out of its context at each place, and the tokens taken
    out. places: shares of the tokens that stay."""
    ids = list(sample.context_ids)
    rest = len(ids) - tokens * len(places)
    taken: list[int] = []
    for place in places:
        at = round(place * rest)
        taken += ids[at : at + tokens]
        del ids[at : at + tokens]
    return replace(sample, context_ids=tuple(ids)), taken


def _cut(messages: list[Message], tokenizer: Tokenizer, length: int) -> CalibrationSample | None:
    """Return the transcript as a sample; None where nothing is asked of it."""
    chat = written(messages, takes_calls=False)
    context: list[int] = []
    questions: list[Question] = []
    for index, message in enumerate(chat):
        if message["role"] != "assistant" or not message["content"]:
            continue
        before = tokenizer.encode(tokenizer.render_chat(chat[:index]))
        if len(before) <= length:
            continue
        context = context or before[:length]
        prompt, answer = before[length:], tokenizer.encode(message["content"])
        if len(prompt) > LONGEST_PROMPT or len(questions) == MOST_QUESTIONS:
            break
        questions.append(Question(tuple(prompt), tuple(answer[:LONGEST_ANSWER])))
    return CalibrationSample(tuple(context), tuple(questions), TRANSCRIPTS) if questions else None


def changed_facts(model_path: str) -> SampleMaker:
    """Return a maker of samples of `CHANGED_FACTS`, told with the model's tokenizer.

    Raises UsageError where it has none.
    """
    tellers = {
        task: partial(_changed_fact, referred_to=task == REFERRED_TO) for task in CHANGED_FACTS
    }
    return text_maker_for(model_path, tellers)


def _changed_fact(rng: np.random.Generator, half: int, *, referred_to: bool) -> Story:
    code = int(rng.integers(1000, 10000))
    prose = sentences(document(rng, half))
    reference = (REFERENCE,) if referred_to else ()
    told: Iterator[str] = chain(
        (f"Remember: the door code of the archive is {code}. Nobody enters without it.",),
        islice(prose, SENTENCES_BEFORE), reference, prose,
    )  # fmt: skip
    asked = Asked(
        "What is the door code of the archive?", "The door code of the archive is ", str(code)
    )
    return Story(told, (), lambda _: [asked])

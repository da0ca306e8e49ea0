"""Recorded sessions of agents as contexts; the questions ask what the agent said next.

    │ system │ user │ assistant │ tool │ assi│stant │ tool │ assistant │ …
    └────────────── context ────────────┘└── prompt ──────┘└─ answer ─┘

Files are those of kvtier.traffic.transcripts; tools are called as text. A context is cut after so
many tokens, wherever that is. Agents take texts out of their contexts later, results of tools above
all. Here they are texts at fixed places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvtier.errors import UsageError
from kvtier.heads.samples.questions import CalibrationSample, Question
from kvtier.synthetic.tokenizer import Tokenizer
from kvtier.traffic.transcripts import ARGUMENT, Message, read_transcripts, written

TASK = "transcripts"
# A context's questions are the answers that come next, as far as they begin near its end.
MOST_QUESTIONS, LONGEST_PROMPT, LONGEST_ANSWER = 4, 1024, 256


def samples(file: Path, tokenizer: Tokenizer, length: int, count: int) -> list[CalibrationSample]:
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
    return CalibrationSample(tuple(context), tuple(questions), TASK) if questions else None


__all__ = ["ARGUMENT", "TASK", "elided", "samples"]

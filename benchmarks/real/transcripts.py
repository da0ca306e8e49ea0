"""Recorded sessions of agents as contexts; the question is what the agent said next.

    │ system │ user │ assistant │ tool │ assi│stant │ tool │ assistant │ …
    └────────────── context ────────────┘└── prompt ──────┘└─ answer ─┘

A file is JSON, or JSON in gzip: a list of transcripts, each a list of messages in OpenAI's format,
or an object that has one as `messages` or, like those of tau-bench, as `traj`. Messages are written
by the model's chat template. A context is cut after so many tokens, wherever that is. Agents take
texts out of their contexts later, results of tools above all; here these are some at fixed places.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from kvtier.errors import UsageError
from kvtier.heads.samples.questions import CalibrationSample, Question
from kvtier.synthetic.tokenizer import Tokenizer

ARGUMENT, TASK = "--transcripts", "transcripts"
# Of one context, the answers that come next, as far as they begin near its end.
MOST_QUESTIONS, LONGEST_PROMPT, LONGEST_ANSWER = 4, 1024, 256


class Call(BaseModel):
    """A tool that is called. arguments: JSON."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    function: Call


class Message(BaseModel):
    role: str
    content: str | None = None
    tool_calls: list[ToolCall] | None = None

    def text(self) -> str:
        """The content, and a line for each tool that is called."""
        calls = [
            f'<tool_call>{{"name": "{call.function.name}", "arguments": {call.function.arguments}}}'
            "</tool_call>"
            for call in self.tool_calls or ()
        ]
        return "\n".join([*([self.content] if self.content else []), *calls])


def samples(file: Path, tokenizer: Tokenizer, length: int, count: int) -> list[CalibrationSample]:
    """The first `count` transcripts that go on behind `length` tokens, cut there.

    Raises UsageError for a file without them, and a model without a chat template.
    """
    if not tokenizer.has_chat_template:
        raise UsageError("--model-path", "a model with a chat template", tokenizer.model_path)
    found: list[CalibrationSample] = []
    for messages in _read(file):
        if len(found) == count:
            break
        sample = _cut(messages, tokenizer, length)
        if sample is not None:
            found.append(sample)
    if len(found) < count:
        expected = f"{count} transcripts that go on behind {length} tokens"
        raise UsageError(ARGUMENT, expected, f"{file}: {len(found)}")
    return found


def elided(
    sample: CalibrationSample, places: Sequence[float], tokens: int
) -> tuple[CalibrationSample, list[int]]:
    """The sample with `tokens` taken out of its context at each place, given as a share of what
    stays; and what was taken out."""
    ids = list(sample.context_ids)
    rest = len(ids) - tokens * len(places)
    taken: list[int] = []
    for place in places:
        at = round(place * rest)
        taken += ids[at : at + tokens]
        del ids[at : at + tokens]
    return replace(sample, context_ids=tuple(ids)), taken


def _cut(messages: list[Message], tokenizer: Tokenizer, length: int) -> CalibrationSample | None:
    """The transcript as a sample; None where nothing is asked of it."""
    chat = [{"role": one.role, "content": one.text()} for one in messages]
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


def _read(file: Path) -> list[list[Message]]:
    try:
        raw = file.read_bytes()
        text = gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw
        document = json.loads(text)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise UsageError(ARGUMENT, "a file of JSON", f"{file}: {error}") from error
    if not isinstance(document, list):
        raise UsageError(ARGUMENT, "a list of transcripts", str(file))
    return [_messages(one, f"{file}, transcript {place}") for place, one in enumerate(document, 1)]


def _messages(given: Any, where: str) -> list[Message]:
    if isinstance(given, dict):
        given = given.get("messages", given.get("traj"))
    try:
        return TypeAdapter(list[Message]).validate_python(given)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        place = ".".join(map(str, found["loc"]))
        raise UsageError(ARGUMENT, "messages in OpenAI's format", f"{where}: {place}") from error


__all__ = ["ARGUMENT", "TASK", "elided", "samples"]

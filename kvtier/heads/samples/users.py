"""A user's own calibration samples, one JSON object per line:

    {"context": str, "questions": [{"question": str, "answer": str}, …], "task": str (optional)}

The three texts are tokenised one by one and joined as they are, behind the tokenizer's BOS where
there is one: chat markup, line breaks and the space in front of an answer belong into the file.

Within each task the 1st, 3rd, 5th … sample of the file calibrates; the 2nd, 4th … is held out and
measures.  So at least one task needs two samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvtier.errors import SamplesFileError
from kvtier.heads.samples.questions import CalibrationSample, Question
from kvtier.heads.samples.text import Encode
from kvtier.reading import read_json_lines
from kvtier.retention.locality import LocalityRule

DEFAULT_TASK = "own"


class UserQuestion(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    question: str = Field(min_length=1)
    answer: str = Field(min_length=1)


class UserSample(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    context: str = Field(min_length=1)
    questions: list[UserQuestion] = Field(min_length=1)
    task: str = Field(DEFAULT_TASK, min_length=1)


class Split(NamedTuple):
    """Samples to choose heads on, and samples to measure the choice on."""

    calibration: list[CalibrationSample]
    held_out: list[CalibrationSample]


def read_user_samples(
    path: Path, encode: Encode, first: Sequence[int], rule: LocalityRule, longest: int = 0
) -> Split:
    """Read and split a file of samples.

    first:    ids that start every context (often BOS)
    rule:     every context must be long enough to drop something
    longest:  tokens of context, question and answer that the model can take; 0 if unknown

    Raises SamplesFileError naming the file and, where there is one, line and field.
    """
    split, seen = Split([], []), dict[str, int]()
    for where, given in read_json_lines(path, "--samples-file", SamplesFileError):
        sample = _sample(where, given, encode, first, rule, longest)
        seen[sample.task] = seen.get(sample.task, 0) + 1
        split[(seen[sample.task] + 1) % 2].append(sample)
    if not split.held_out:
        raise SamplesFileError(
            f"--samples-file: {path}", "two samples of one task or more", dict(seen)
        )
    return split


def _sample(
    where: str, fields: dict[str, Any], encode: Encode, first: Sequence[int], rule: LocalityRule,
    longest: int,
) -> CalibrationSample:  # fmt: skip
    """One line as a sample in tokens. where: the line's place; otherwise as `read_user_samples`."""

    def refusal(field: str, expected: str, got: object) -> SamplesFileError:
        return SamplesFileError(f"{where}: {field}", expected, got)

    def tokens(field: str, text: str) -> tuple[int, ...]:
        ids = encode(text)
        if not ids:
            raise refusal(field, "text that the tokenizer knows", text)
        return tuple(ids)

    try:
        given = UserSample.model_validate(fields)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        got = f"{found['msg']}: {found['input']!r:.60}"
        raise refusal(".".join(map(str, found["loc"])), "a sample's field", got) from error
    context = encode(given.context)
    if list(context[: len(first)]) != list(first):
        context = [*first, *context]
    if rule.dropped(0, len(context), len(context)).num_tokens == 0:
        raise refusal("context", f"at least {rule.least_tokens} tokens", len(context))
    questions = []
    for index, pair in enumerate(given.questions):
        field = f"questions.{index}"
        question = tokens(f"{field}.question", pair.question)
        answer = tokens(f"{field}.answer", pair.answer)
        total = len(context) + len(question) + len(answer)
        if longest and total > longest:
            expected = f"at most {longest} tokens of context, question and answer"
            raise refusal(field, expected, total)
        questions.append(Question(question, answer))
    return CalibrationSample(tuple(context), tuple(questions), given.task)

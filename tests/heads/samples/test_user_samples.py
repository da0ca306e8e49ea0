"""A user's own samples: what a good file becomes, and what a bad one is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import SamplesFileError
from kvtier.heads.samples.users import read_user_samples
from kvtier.retention.locality import LocalityRule

RULE = LocalityRule(sink_tokens=4, recent_tokens=6, branch_recent_tokens=2)
GOOD: dict[str, Any] = {
    "context": "a context of some words",
    "questions": [{"question": " what?", "answer": " this"}, {"question": "?", "answer": "x"}],
}


def encode(text: str) -> list[int]:
    """One token per character; a soft hyphen is none."""
    return [ord(character) for character in text if character != "\u00ad"]


def read(folder: Path, *lines: object, longest: int = 0, first: tuple[int, ...] = (1,)) -> Any:
    file = folder / "own.jsonl"
    file.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return read_user_samples(file, encode, first, RULE, longest)


def test_texts_become_tokens_as_they_are(tmp_path: Path) -> None:
    split = read(tmp_path, GOOD, GOOD)
    assert split.calibration == split.held_out
    (sample,) = split.calibration
    assert sample.context_ids == (1, *encode("a context of some words"))
    assert sample.task == "own"
    assert [q.prompt_ids for q in sample.questions] == [tuple(encode(" what?")), (ord("?"),)]
    assert [q.answer_ids for q in sample.questions] == [tuple(encode(" this")), (ord("x"),)]
    # A beginning is not said twice.
    split = read(tmp_path, GOOD, GOOD, first=(ord("a"),))
    assert split.calibration[0].context_ids == tuple(encode(GOOD["context"]))


def test_every_second_sample_of_a_task_is_held_out(tmp_path: Path) -> None:
    tasks = ["a", "b", "a", "b", "a", "c", "b", "a"]
    lines: list[object] = [
        GOOD | {"task": task, "context": f"the context number {number}"}
        for number, task in enumerate(tasks)
    ]
    lines.insert(2, "")  # blank lines are no samples
    split = read(tmp_path, *lines)

    def numbers(samples: Any) -> list[int]:
        return [int(chr(sample.context_ids[-1])) for sample in samples]

    assert numbers(split.calibration) == [0, 1, 4, 5, 6]
    assert numbers(split.held_out) == [2, 3, 7]


def changed(**fields: Any) -> dict[str, Any]:
    return GOOD | fields


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ({"questions": GOOD["questions"]}, r"line 2: context: .*Field required"),
        ({"context": "x"}, r"line 2: questions: .*Field required"),
        (changed(context=5), r"line 2: context: .*valid string: 5"),
        (changed(context=""), r"line 2: context: .*at least 1 character"),
        (changed(questions=[]), r"line 2: questions: .*at least 1 item"),
        (
            changed(questions=[*GOOD["questions"], {"question": "q"}]),
            r"questions\.2\.answer: ",
        ),
        (
            changed(questions=[{"question": "q", "answer": 1}]),
            r"\.0\.answer: .*string: 1",
        ),
        (changed(questions=[{"question": "q", "answer": "\u00ad"}]), r"\.answer: .* tokenizer"),
        (changed(taks="qa"), r"line 2: taks: .*not permitted"),
        (changed(context="short"), r"line 2: context: expected at least 12 tokens, got 6"),
        (changed(context="x" * 99), r"line 2: questions\.0: expected at most 60 tokens.*111"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_field(
    line: object, match: str, tmp_path: Path
) -> None:
    with pytest.raises(SamplesFileError, match=match) as caught:
        read(tmp_path, GOOD, line, GOOD, longest=60)
    assert str(tmp_path / "own.jsonl") in str(caught.value)
    assert len(str(caught.value)) < 400


def test_files_without_samples_are_refused(tmp_path: Path) -> None:
    for lines in ([], ["", "  "], [GOOD], [GOOD, changed(task="other")]):
        with pytest.raises(SamplesFileError, match="two samples of one task"):
            read(tmp_path, *lines)
    with pytest.raises(SamplesFileError, match="a readable file"):
        read_user_samples(tmp_path / "none.jsonl", encode, (), RULE)

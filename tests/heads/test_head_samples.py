"""Calibration samples: exact lengths, right answers, reproducible, for any tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvtier.bench.recall import DEFAULT_LANGUAGE
from kvtier.errors import SizeError, UsageError
from kvtier.heads.samples import (
    HELD_OUT,
    RECALL_TASKS,
    TEXT_TASKS,
    make_samples,
    recall_sample,
    speaks_recall,
    text_maker,
)


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(ids: tuple[int, ...]) -> str:
    return bytes(ids).decode()


@pytest.mark.parametrize("task", RECALL_TASKS)
def test_recall_answers_stand_in_the_context(task: str) -> None:
    sample = recall_sample(np.random.default_rng(0), 2048, task)
    context = DEFAULT_LANGUAGE.decode(sample.context_ids)
    assert len(sample.context_ids) == 2048
    for question in sample.questions:
        assert DEFAULT_LANGUAGE.decode(question.answer_ids) in context
        given = question.answer_ids[: question.unscored]
        assert question.prompt_ids[-3:-1] == given, "the name is said by the question already"


def test_text_has_the_exact_length_and_the_answers() -> None:
    maker = text_maker(encode, first=[1])
    for length in (3000, 4096):
        sample = maker(np.random.default_rng(0), length, "key-value")
        assert len(sample.context_ids) == length
        assert sample.context_ids[0] == 1
        context = decode(sample.context_ids[1:])
        for question in sample.questions:
            asked = decode(question.prompt_ids).rsplit("Answer: The", 1)[1]
            assert f"The{asked}{decode(question.answer_ids)}." in context


def test_two_hops_lead_to_the_answer() -> None:
    sample = text_maker(encode, [])(np.random.default_rng(3), 4096, "two-hop")
    context = decode(sample.context_ids)
    for question in sample.questions:
        name = decode(question.prompt_ids).rsplit("The code of ", 1)[1].removesuffix(" is")
        other = context.split(f"{name} has the same code as ")[1].split(".")[0]
        assert f"The code of {other} is{decode(question.answer_ids)}." in context
        assert f"The code of {name} is" not in context


@pytest.mark.parametrize("tasks", [RECALL_TASKS, TEXT_TASKS])
def test_samples_repeat_and_held_out_ones_differ(tasks: tuple[str, ...]) -> None:
    maker = recall_sample if tasks == RECALL_TASKS else text_maker(encode, [])
    first = make_samples(maker, tasks, 3, [2560, 4096], seed=5)
    assert first == make_samples(maker, tasks, 3, [2560, 4096], seed=5)
    assert [s.task for s in first] == [tasks[0], tasks[1], tasks[0]] * 2
    held_out = make_samples(maker, tasks, 3, [2560, 4096], seed=5, stream=HELD_OUT)
    contexts = {s.context_ids for s in (*first, *held_out)}
    assert len(contexts) == 12


def test_only_the_recall_language_speaks_recall(tmp_path: Path) -> None:
    assert not speaks_recall(str(tmp_path))
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"vocab": dict(DEFAULT_LANGUAGE.ids)}}))
    assert speaks_recall(str(tmp_path))
    file.write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    assert not speaks_recall(str(tmp_path))
    file.write_text("[]")
    assert not speaks_recall(str(tmp_path))


def test_errors_name_the_argument() -> None:
    with pytest.raises(UsageError, match="--samples"):
        make_samples(recall_sample, RECALL_TASKS, 0, [2048], 0)
    with pytest.raises(SizeError, match="--len"):
        text_maker(encode, [])(np.random.default_rng(0), 100, "key-value")
    with pytest.raises(SizeError, match="--len"):
        recall_sample(np.random.default_rng(0), 5, "recall")

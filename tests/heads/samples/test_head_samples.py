"""Calibration samples: exact lengths, right answers, reproducible, for any tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import SizeError, UsageError
from kvtier.heads.samples.synthetic import (
    HELD_OUT,
    RECALL_TASKS,
    make_samples,
    recall_sample,
    speaks_recall,
)
from kvtier.synthetic.recall import DEFAULT_LANGUAGE


@pytest.mark.parametrize("task", RECALL_TASKS)
def test_recall_answers_stand_in_the_context(task: str) -> None:
    sample = recall_sample(np.random.default_rng(0), 2048, task)
    context = DEFAULT_LANGUAGE.decode(sample.context_ids)
    assert len(sample.context_ids) == 2048
    for question in sample.questions:
        assert DEFAULT_LANGUAGE.decode(question.answer_ids) in context
        given = question.answer_ids[: question.unscored]
        assert question.prompt_ids[-3:-1] == given, "the name is said by the question already"


def test_few_codes_make_answers_share_their_words() -> None:
    def words(task: str) -> int:
        sample = recall_sample(np.random.default_rng(0), 2048, task)
        return len({code for question in sample.questions for code in question.answer_ids[2:]})

    assert words("few-codes") < 50 < words("recall")


def test_samples_repeat_and_held_out_ones_differ() -> None:
    first = make_samples(recall_sample, RECALL_TASKS, 3, [2560, 4096], seed=5)
    assert first == make_samples(recall_sample, RECALL_TASKS, 3, [2560, 4096], seed=5)
    assert [s.task for s in first] == [*RECALL_TASKS] * 2
    held_out = make_samples(recall_sample, RECALL_TASKS, 3, [2560, 4096], seed=5, stream=HELD_OUT)
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
        recall_sample(np.random.default_rng(0), 5, "recall")

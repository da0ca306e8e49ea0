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
    """Few codes make answers share their words."""
    sample = recall_sample(np.random.default_rng(0), 2048, task)
    context = DEFAULT_LANGUAGE.decode(sample.context_ids)
    assert len(sample.context_ids) == 2048
    for question in sample.questions:
        assert DEFAULT_LANGUAGE.decode(question.answer_ids) in context
        given = question.answer_ids[: question.unscored]
        assert question.prompt_ids[-3:-1] == given, "the name is said by the question already"
    codes = {code for question in sample.questions for code in question.answer_ids[2:]}
    assert (len(codes) < 50) == (task == "few-codes")


def test_samples_repeat_and_held_out_ones_differ() -> None:
    first = make_samples(recall_sample, RECALL_TASKS, 3, [2560, 4096], seed=5)
    assert first == make_samples(recall_sample, RECALL_TASKS, 3, [2560, 4096], seed=5)
    assert [s.task for s in first] == [*RECALL_TASKS] * 2
    held_out = make_samples(recall_sample, RECALL_TASKS, 3, [2560, 4096], seed=5, stream=HELD_OUT)
    contexts = {s.context_ids for s in (*first, *held_out)}
    assert len(contexts) == 12
    with pytest.raises(UsageError, match="--samples"):
        make_samples(recall_sample, RECALL_TASKS, 0, [2048], 0)
    with pytest.raises(SizeError, match="--len"):
        recall_sample(np.random.default_rng(0), 5, "recall")


def test_only_the_recall_language_speaks_recall(tmp_path: Path) -> None:
    assert not speaks_recall(str(tmp_path))
    file = tmp_path / "tokenizer.json"
    for text, speaks in (
        (json.dumps({"model": {"vocab": dict(DEFAULT_LANGUAGE.ids)}}), True),
        (json.dumps({"model": {"vocab": {"a": 0}}}), False),
        ("[]", False),
    ):
        file.write_text(text)
        assert speaks_recall(str(tmp_path)) == speaks

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
    TEXT_TASKS,
    make_samples,
    recall_sample,
    speaks_recall,
    text_maker,
)
from kvtier.synthetic.recall import DEFAULT_LANGUAGE


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


def test_qa_asks_in_other_words() -> None:
    sample = text_maker(encode, [])(np.random.default_rng(1), 4096, "qa")
    context = decode(sample.context_ids)
    assert len(sample.questions) == 16
    for question in sample.questions:
        asked, answer = decode(question.prompt_ids), decode(question.answer_ids)
        name = asked.split("What does ")[1].split(" do for a living")[0]
        life = context.split(f"{name} moved to ")[1].split(".")[0]
        city, trade = life.split(" and became a ")
        assert answer == f" {trade} in {city}."
        assert asked.split("Answer:")[1].strip() not in context


def test_summaries_list_the_stops_in_the_order_of_the_text() -> None:
    sample = text_maker(encode, [])(np.random.default_rng(2), 4096, "summary")
    context = decode(sample.context_ids)
    journeys = []
    for question in sample.questions:
        name = decode(question.prompt_ids).split("journey of ")[1].split(":")[0]
        stops = [part.split(".")[0] for part in context.split(f"{name} arrived in ")[1:]]
        assert decode(question.answer_ids) == f" {', '.join(stops)}."
        assert len(set(stops)) == 4
        journeys.append([context.index(f"{name} arrived in {stop}.") for stop in stops])
    assert len(journeys) == 8
    for journey in journeys:
        others = [place for other in journeys if other != journey for place in other]
        assert any(min(journey) < place < max(journey) for place in others), "told among others"


def test_the_tasks_cover_the_paper_s_profiling_set() -> None:
    assert TEXT_TASKS == ("key-value", "qa", "two-hop", "summary")
    assert set(RECALL_TASKS) == {"recall", "near-miss", "few-codes"}


def test_few_codes_make_answers_share_their_words() -> None:
    def words(task: str) -> int:
        sample = recall_sample(np.random.default_rng(0), 2048, task)
        return len({code for question in sample.questions for code in question.answer_ids[2:]})

    assert words("few-codes") < 50 < words("recall")


@pytest.mark.parametrize("tasks", [RECALL_TASKS, TEXT_TASKS])
def test_samples_repeat_and_held_out_ones_differ(tasks: tuple[str, ...]) -> None:
    maker = recall_sample if tasks == RECALL_TASKS else text_maker(encode, [])
    first = make_samples(maker, tasks, 3, [2560, 4096], seed=5)
    assert first == make_samples(maker, tasks, 3, [2560, 4096], seed=5)
    assert [s.task for s in first] == [tasks[i % len(tasks)] for i in range(3)] * 2
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

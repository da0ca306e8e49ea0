"""Calibration samples in real text: exact lengths, known answers, halves that share nothing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
from text_models import CHATML, write_tokenizer

from kvtier.errors import SizeError
from kvtier.heads.samples.questions import CalibrationSample
from kvtier.heads.samples.synthetic import HELD_OUT, make_samples, tasks_for
from kvtier.heads.samples.text import CHOOSING_TASKS, TEXT_TASKS, text_maker
from kvtier.synthetic.frame import Frame
from kvtier.synthetic.standard_library import (
    docstring_paragraphs,
    document,
    functions,
    library_functions,
    reference_paragraphs,
)

FRAME = Frame("", "\n\nQuestion: ", "\nAnswer: ", "\n", "Question: ", (10,))
LENGTH = 8192


def encode(text: str) -> list[int]:
    """One token per character."""
    return [ord(character) for character in text]


def decode(ids: tuple[int, ...]) -> str:
    return "".join(map(chr, ids))


def sample_of(task: str, seed: int = 0, length: int = LENGTH, half: int = 0) -> CalibrationSample:
    return text_maker(encode, [], FRAME)(np.random.default_rng(seed), length, task, half)


def told(task: str, seed: int = 0) -> tuple[str, list[tuple[str, str, str]]]:
    """The context, and per question what is asked, how the answer begins, and how it goes on."""
    sample = sample_of(task, seed)
    asked = []
    for question in sample.questions:
        begun, answer = decode(question.prompt_ids), decode(question.answer_ids)
        question_text, _, begun = begun.removeprefix("\n\nQuestion: ").rpartition("\nAnswer: ")
        asked.append((question_text, begun, answer))
    return decode(sample.context_ids), asked


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_lengths_are_exact_and_samples_repeat(task: str) -> None:
    sample = sample_of(task)
    assert len(sample.context_ids) == LENGTH
    assert sample == sample_of(task)
    assert sample != sample_of(task, seed=10)
    assert sample.task == task


@pytest.mark.parametrize("task", ["key-value", "values", "quotation", "code"])
def test_answers_go_on_as_the_context_does(task: str) -> None:
    context, asked = told(task, 4)
    assert len(asked) == 12 or task == "code"
    for question, begun, answer in asked:
        fact = f" {begun}{answer}".rstrip(".") + "."
        found = context.count(fact if task in ("key-value", "values") else begun + answer)
        assert found == 1 or (task == "code" and found)
        if task == "code":
            assert isinstance(ast.parse(f"{begun}{answer}: pass").body[0], ast.FunctionDef)
        if task == "quotation":
            assert begun in question
            assert (len(begun.split()), len(answer.split())) == (9, 8)


def test_two_hops_lead_to_the_answer() -> None:
    context, asked = told("two-hop", 3)
    for _, begun, answer in asked:
        name = begun.removeprefix("The code of ").removesuffix(" is")
        other = context.split(f"{name} has the same code as ")[1].split(".")[0]
        assert f"The code of {other} is{answer}." in context
        assert f"The code of {name} is" not in context


def test_variables_are_all_that_a_value_reaches() -> None:
    context, asked = told("variables", 1)
    first = dict(re.findall(r" The number (\d+) goes to (\w+)\.", context))
    then = dict(re.findall(r" From (\w+) it goes to (\w+)\.", context))
    assert (len(first), len(then)) == (6, 12)
    for _, begun, answer in asked:
        number = re.search(r"\d+", begun)
        assert number is not None
        name = first[number[0]]
        expected = f" {name}."
        while name in then:
            expected += f" From {name} it goes to {then[name]}."
            name = then[name]
        assert answer == expected


def test_qa_asks_in_other_words() -> None:
    context, asked = told("qa")
    for question, begun, answer in asked:
        name = question.removeprefix("What does ").split(" do for a living")[0]
        city, trade = context.split(f"{name} moved to ")[1].split(".")[0].split(" and became a ")
        assert answer == f" {trade} in {city}."
        assert begun not in context


def test_summaries_list_the_stops_in_the_order_of_the_text() -> None:
    context, asked = told("summary", 2)
    for _, begun, answer in asked:
        stops = re.findall(rf"{begun} (\w+)\.", context)
        assert answer == f" {', '.join(stops)}."
        assert len(stops) == 4


def test_most_votes_are_for_one() -> None:
    context, asked = told("common", 5)
    assert len(asked) == 4
    for _, begun, answer in asked:
        poll = begun.removeprefix("Most votes for the best ").removesuffix(" go to")
        votes = re.findall(rf" One vote for the best {poll} goes to (\w+)\.", context)
        counts = {choice: votes.count(choice) for choice in votes}
        assert len(votes) == 10
        assert answer == f" {max(counts, key=lambda choice: counts[choice])}."
        assert sorted(counts.values())[-2] == 1


def test_the_halves_share_nothing() -> None:
    def drawn(half: int, count: int) -> set[str]:
        source = document(np.random.default_rng(half), half)
        return {next(source) for _ in range(count)}

    everything = len(reference_paragraphs()) + len(docstring_paragraphs())
    assert not drawn(0, everything) & drawn(1, everything)
    sources = [functions(np.random.default_rng(1), half) for half in (0, 1)]
    halves = [{next(source).name for _ in library_functions()} for source in sources]
    assert not halves[0] & halves[1]
    assert sum(map(len, halves)) >= len(library_functions()) - 1


@pytest.mark.parametrize("template", [None, CHATML])
def test_contexts_and_questions_stand_in_the_models_own_format(
    tmp_path: Path, template: str | None
) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", template=template)
    tasks = tasks_for(str(folder))
    assert (tasks.choosing, tasks.measuring) == (CHOOSING_TASKS, TEXT_TASKS)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    samples = make_samples(tasks.make, tasks.measuring, len(TEXT_TASKS), [3000], 0, HELD_OUT)
    for sample in samples:
        context = tokenizer.decode(list(sample.context_ids))
        start = "<|im_start|>system\nAnswer briefly" if template else "<s>"
        assert context.startswith(start)
        assert context.count("<s>") == (0 if template else 1)
        asked = tokenizer.decode(list(sample.questions[0].prompt_ids))
        reply = "<|im_end|>\n<|im_start|>assistant\n" if template else "\nAnswer: "
        assert (reply in asked) == (sample.task not in ("continuation", "many-shot"))


@pytest.mark.parametrize(("task", "length"), [("key-value", 300), ("code", 120)])
def test_a_context_too_short_for_its_facts_is_refused(task: str, length: int) -> None:
    with pytest.raises(SizeError, match="--len"):
        sample_of(task, length=length)

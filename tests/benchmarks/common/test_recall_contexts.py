"""The contexts of the Compactor comparison: reproducible, and every question has one answer."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.recall_contexts import (
    FACTS_PER_QUESTION,
    KINDS,
    LOOK_ALIKES,
    STANDING_OUT,
    RecallContext,
    load_contexts,
    make_context,
    make_contexts,
    save_contexts,
)
from kvtier.errors import UsageError
from kvtier.synthetic.recall import DEFAULT_LANGUAGE, FACT_TOKENS, NUM_CODES

TOKENS, QUESTIONS = 1024, 8


def small(kind: str, seed: int = 0, index: int = 0) -> RecallContext:
    return make_context(kind, seed, index, TOKENS, QUESTIONS)


def num_names(context: RecallContext) -> int:
    return sum(word in DEFAULT_LANGUAGE.nouns for word in context.context_ids)


def num_codes(context: RecallContext) -> int:
    return sum(word in DEFAULT_LANGUAGE.codes for word in context.context_ids)


def fact_positions(context: RecallContext) -> list[int]:
    """Return where each asked name stands, which must be exactly once."""
    found = []
    for question in context.questions:
        at = [i for i, pair in enumerate(pairwise(context.context_ids))
              if pair == question.answer_ids[:2]]  # fmt: skip
        assert len(at) == 1
        found.append(at[0])
    return found


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**31))
def test_every_question_has_one_right_answer_and_it_stands_in_the_context(
    kind: str, seed: int
) -> None:
    context = small(kind, seed)
    assert len(context.context_ids) == TOKENS
    assert context.context_ids[0] == DEFAULT_LANGUAGE.bos
    for question, at in zip(context.questions, fact_positions(context), strict=True):
        end = at + len(question.answer_ids)
        assert context.context_ids[at:end] == question.answer_ids
        assert context.context_ids[end] == DEFAULT_LANGUAGE.full_stop
        assert question.prompt_ids[-3:-1] == question.answer_ids[:2]


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31))
def test_no_two_neighbours_of_a_fact_stand_anywhere_else(seed: int) -> None:
    context = small(LOOK_ALIKES, seed)
    pairs = list(pairwise(context.context_ids))
    for question in context.questions:
        for pair in pairwise(question.answer_ids):
            assert pairs.count(pair) == 1


def test_look_alikes_have_unasked_facts_and_code_runs_and_standing_out_has_neither() -> None:
    hidden, plain = small(LOOK_ALIKES), small(STANDING_OUT)
    assert num_names(hidden) == FACTS_PER_QUESTION * QUESTIONS
    assert num_names(plain) == QUESTIONS
    assert num_codes(plain) == NUM_CODES * QUESTIONS
    free = TOKENS - 1 - FACT_TOKENS * FACTS_PER_QUESTION * QUESTIONS
    in_runs = num_codes(hidden) - NUM_CODES * FACTS_PER_QUESTION * QUESTIONS
    assert 0.25 < in_runs / free < 0.6


def test_a_context_depends_on_kind_seed_and_index_only() -> None:
    one, two = make_contexts(LOOK_ALIKES, 3, 2, TOKENS, QUESTIONS)
    assert two == small(LOOK_ALIKES, 3, 1)
    assert len({one.context_ids, two.context_ids, small(LOOK_ALIKES, 4).context_ids}) == 3


def test_saved_contexts_come_back_equal(tmp_path: Path) -> None:
    contexts = [small(kind) for kind in KINDS]
    save_contexts(tmp_path / "contexts.json", contexts, DEFAULT_LANGUAGE.eot)
    assert load_contexts(tmp_path / "contexts.json") == contexts


@pytest.mark.parametrize(
    ("kind", "questions", "argument"),
    [("hidden", 4, "kind"), (STANDING_OUT, 0, "questions"), (LOOK_ALIKES, 99, "questions")],
)
def test_impossible_contexts_are_refused_by_name(kind: str, questions: int, argument: str) -> None:
    with pytest.raises(UsageError, match=argument):
        make_contexts(kind, 0, 1, TOKENS, questions)

"""The promises of a session of the recall language to training and to measurements."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.synthetic.recall import (
    ANSWER_TOKENS,
    DEFAULT_LANGUAGE,
    FACT_TOKENS,
    NUM_CODES,
    RecallLanguage,
    Session,
    make_session,
    score_answer,
)

sessions = st.builds(
    lambda seed, tokens, turns, invented, shared: make_session(
        np.random.default_rng(seed), tokens, turns, invented_share=invented, shared_words=shared
    ),
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(24, 3000),
    turns=st.integers(1, 12),
    invented=st.sampled_from([0.0, 0.4, 1.0]),
    shared=st.booleans(),
)


def test_the_vocabulary_is_384_different_words_in_class_runs():
    language = DEFAULT_LANGUAGE
    assert language.vocab_size == len(set(language.vocab)) == 384
    runs = (language.adjectives, language.nouns, language.codes, language.filler)
    assert [len(run) for run in runs] == [32, 32, 64, 248]
    assert language.filler.stop == language.vocab_size


def test_equal_seeds_give_equal_languages_and_sessions():
    first, second = (make_session(np.random.default_rng(5), 500, 6) for _ in range(2))
    assert np.array_equal(first.context_ids, second.context_ids)
    assert first.turns == second.turns
    assert np.array_equal(RecallLanguage(seed=1).transitions, RecallLanguage(seed=1).transitions)
    assert not np.array_equal(
        RecallLanguage(seed=1).transitions, RecallLanguage(seed=2).transitions
    )


@given(sessions)
@settings(max_examples=60)
def test_every_fact_stands_where_it_says(session: Session):
    for fact in session.facts:
        span = session.context_ids[fact.position : fact.position + FACT_TOKENS]
        assert span.tolist() == [*fact.answer_ids, DEFAULT_LANGUAGE.full_stop]


@given(sessions)
@settings(max_examples=60)
def test_names_are_unique_and_no_pair_of_neighbouring_codes_comes_twice(session: Session):
    names = [fact.name for fact in session.facts]
    assert len(set(names)) == len(names)
    pairs = [
        pair
        for fact in session.facts
        for pair in zip((fact.name[1], *fact.codes), fact.codes, strict=False)
    ]
    assert len(set(pairs)) == len(pairs)


@given(sessions)
@settings(max_examples=60)
def test_turns_ask_for_facts_of_the_context_or_for_names_outside_it(session: Session):
    by_name = {fact.name: fact for fact in session.facts}
    for index, turn in enumerate(session.turns):
        assert turn.prompt_ids[0] == DEFAULT_LANGUAGE.user
        assert turn.prompt_ids[-3:] == (*turn.name, DEFAULT_LANGUAGE.assistant)
        if turn.refers_to_turn is not None:
            assert turn.refers_to_turn < index
            assert session.turns[turn.refers_to_turn].name == turn.name
            assert session.turns[turn.refers_to_turn].invents
        if turn.invents or turn.refers_to_turn is not None:
            assert turn.name not in by_name
        else:
            assert turn.answer_ids == by_name[turn.name].answer_ids


@given(sessions)
@settings(max_examples=30)
def test_teacher_forcing_repeats_what_was_invented(session: Session):
    ids, marks = session.answered_ids(np.random.default_rng(0))
    assert len(ids) == len(marks)
    answers = []
    at = 0
    for turn in session.turns:
        at += len(turn.prompt_ids)
        answer = ids[at : at + ANSWER_TOKENS - 1]
        assert marks[at : at + ANSWER_TOKENS].count(2) == (NUM_CODES if turn.invents else 0)
        assert turn.expected(answers) in (None, tuple(answer))
        answers.append(answer)
        at += ANSWER_TOKENS
    assert at == len(ids)


@given(st.lists(st.integers(0, 383), max_size=50))
def test_text_and_ids_are_two_forms_of_the_same(token_ids: list[int]):
    assert DEFAULT_LANGUAGE.encode(DEFAULT_LANGUAGE.decode(token_ids)) == token_ids


def test_an_unknown_word_becomes_unk():
    assert DEFAULT_LANGUAGE.encode("river xyzzy") == DEFAULT_LANGUAGE.encode("river <unk>")


def test_filler_follows_the_markov_table():
    language = DEFAULT_LANGUAGE
    walk = language.filler_walk(np.random.default_rng(3), 2000)
    for word, following in pairwise(walk):
        assert following in language.transitions[word - language.filler.start]


@pytest.mark.parametrize("tokens", [1024, 131072])
def test_context_length_is_exact_and_facts_spread_over_all_of_it(tokens: int):
    session = make_session(np.random.default_rng(0), tokens, 5, 64)
    assert len(session.context_ids) == tokens
    assert [len(turn.prompt_ids) for turn in session.turns] == [17] * 5
    thirds = {fact.position * 3 // tokens for fact in session.facts}
    assert thirds == {0, 1, 2}


def test_scores_count_codes_place_by_place():
    expected = (
        make_session(np.random.default_rng(0), 200, 1, 3, invented_share=0).turns[0].answer_ids
    )
    eot = DEFAULT_LANGUAGE.eot
    assert score_answer(expected, [*expected, eot, 7]).strict
    assert score_answer(expected, expected).codes == 1.0
    half = [*expected[:6], 0, 0, 0, 0]
    assert score_answer(expected, half).codes == 0.5
    assert not score_answer(expected, half).strict
    assert score_answer(expected, []).codes == 0.0
    assert not score_answer(expected, [*expected, expected[-1]]).strict


@pytest.mark.parametrize(("tokens", "facts", "prompt"), [(20, 5, 17), (100, 0, 17), (100, 2, 3)])
def test_what_does_not_fit_is_refused_by_name(tokens: int, facts: int, prompt: int):
    with pytest.raises(ValueError, match=r"num_facts|prompt_tokens"):
        make_session(np.random.default_rng(0), tokens, 2, facts, prompt_tokens=prompt)

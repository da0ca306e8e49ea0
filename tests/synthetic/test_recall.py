"""The promises of a session of the recall language to training and to measurements."""

from __future__ import annotations

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


def test_equal_seeds_give_equal_sessions():
    first, second = (make_session(np.random.default_rng(5), 500, 6) for _ in range(2))
    assert np.array_equal(first.context_ids, second.context_ids)
    assert first.turns == second.turns
    assert np.array_equal(RecallLanguage().transitions, RecallLanguage().transitions)


@given(sessions)
@settings(max_examples=60)
def test_facts_stand_where_they_say_under_unique_names_and_turns_ask_for_them(session: Session):
    """No pair of neighbouring codes comes twice. A name outside of the context has its answer
    invented, or asks for what was."""
    for fact in session.facts:
        span = session.context_ids[fact.position : fact.position + FACT_TOKENS]
        assert span.tolist() == [*fact.answer_ids, DEFAULT_LANGUAGE.full_stop]
    by_name = {fact.name: fact for fact in session.facts}
    assert len(by_name) == len(session.facts)
    pairs = [
        pair
        for fact in session.facts
        for pair in zip((fact.name[1], *fact.codes), fact.codes, strict=False)
    ]
    assert len(set(pairs)) == len(pairs)
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
    assert DEFAULT_LANGUAGE.encode("river xyzzy") == DEFAULT_LANGUAGE.encode("river <unk>")


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
    assert score_answer(expected, [*expected, eot, 7]) == 1.0
    assert score_answer(expected, expected) == 1.0
    half = [*expected[:6], 0, 0, 0, 0]
    assert score_answer(expected, half) == 0.5
    assert score_answer(expected, []) == 0.0


@pytest.mark.parametrize(("tokens", "facts", "prompt"), [(20, 5, 17), (100, 0, 17), (100, 2, 3)])
def test_what_does_not_fit_is_refused_by_name(tokens: int, facts: int, prompt: int):
    with pytest.raises(ValueError, match=r"num_facts|prompt_tokens"):
        make_session(np.random.default_rng(0), tokens, 2, facts, prompt_tokens=prompt)

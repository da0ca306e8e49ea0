"""Sessions in English: exact lengths, facts that stand in the context, one conversation that only
grows, for tokenizers of three kinds with and without chat templates."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_models import CHATML, INSTRUCT, KINDS, LABELS, NO_BOS, write_tokenizer

from kvtier.bench.measure import Conversation
from kvtier.bench.workload import open_script
from kvtier.errors import SizeError, UsageError
from kvtier.synthetic.recall_script import RecallScript
from kvtier.synthetic.script import Script, ScriptedSession
from kvtier.synthetic.text import TextScript
from kvtier.synthetic.tokenizer import Tokenizer

TEMPLATES = {"chatml": CHATML, "instruct": INSTRUCT, "labels": LABELS, "plain": None}
SAYS = re.compile(r"One vault code is (\w+-\w+)-(\d{5})\.")


@cache
def tokenizer_of(kind: str, template: str) -> Tokenizer:
    with TemporaryDirectory() as folder:
        eos = "<|im_end|>" if template == "chatml" else "</s>"
        return Tokenizer(str(write_tokenizer(Path(folder), kind, TEMPLATES[template], eos)))


@cache
def script_of(kind: str, template: str) -> TextScript:
    return TextScript(tokenizer_of(kind, template))


def text_of(tokenizer: Tokenizer, ids: object) -> str:
    """Return the text with special tokens; a SentencePiece tokenizer writes a space in front of
    each part."""
    return tokenizer._tokenizer.decode(list(ids))


languages = st.tuples(st.sampled_from(KINDS), st.sampled_from(list(TEMPLATES)))
drawn = st.builds(
    lambda seed, tokens, turns, questions: (seed, tokens, turns, questions),
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(400, 6000),
    turns=st.integers(1, 4),
    questions=st.integers(1, 4),
)


def hold(script: Script, asked: tuple[int, int, int, int]) -> ScriptedSession:
    seed, *lengths = asked
    return script.session(np.random.default_rng(seed), *lengths)


@given(languages, drawn)
@settings(max_examples=40)
def test_lengths_are_kept_to_the_token_and_every_answer_stands_in_the_context(language, asked):
    script, tokenizer = script_of(*language), tokenizer_of(*language)
    session = hold(script, asked)
    assert session == hold(script, asked), "the seed decides everything"
    assert len(session.context_ids) == asked[1]
    told = dict(SAYS.findall(text_of(tokenizer, session.context_ids)))
    assert len(session.turns) == len(session.branches) == asked[2]
    questions = [*session.turns, *(each for branch in session.branches for each in branch)]
    assert len(questions) == asked[2] * asked[3]
    for turn in questions:
        assert told[turn.fact.name] == turn.fact.number
        assert len(turn.prompt_ids) <= script.lengths.prompt
        assert len(turn.answer_ids) < script.max_answer
        assert text_of(tokenizer, turn.prompt_ids).count(turn.fact.name) == 2
        whole = text_of(tokenizer, (*turn.prompt_ids, *turn.answer_ids))
        assert whole.endswith(f"The vault code is {turn.fact.name}-{turn.fact.number}")


@given(languages, drawn)
@settings(max_examples=25)
def test_an_answer_is_right_when_its_first_number_is(language, asked):
    script, tokenizer = script_of(*language), tokenizer_of(*language)
    turn = hold(script, asked).turns[0]
    right = turn.expected(())
    assert script.judge(right, [*right, *script.closing_ids]) == 1
    assert script.judge(right, [*right, *tokenizer.encode(". Then 7")]) == 1
    assert script.judge(right, tokenizer.encode(f" {turn.fact.number[:-1]}")) == 0
    assert script.judge(right, tokenizer.encode(f" 7 and {turn.fact.number}")) == 0
    assert script.judge(right, tokenizer.encode(" unknown")) == 0
    assert script.judge(right, script.closing_ids) == 0


@pytest.mark.parametrize("language", [(kind, name) for kind in KINDS for name in TEMPLATES])
@pytest.mark.parametrize("cut_short", [False, True])
def test_a_prompt_is_the_last_prompt_and_what_was_generated_and_the_next_message(
    language: tuple[str, str], cut_short: bool
):
    script = script_of(*language)
    session = hold(script, (1, 600, 3, 2))
    talk = Conversation(0, session, script)
    for index, turn in enumerate(session.turns):
        prompt = [*talk.history, *turn.prompt_ids]
        stop = () if cut_short else script.stop_ids[-1:]
        generated = (*turn.answer_ids, *stop)
        talk.take_answer(turn.prompt_ids, generated)
        closing = script.closing_ids if cut_short or not stop else ()
        assert talk.history == [*prompt, *generated, *closing]
        assert talk.answers[index] == turn.answer_ids
    assert not set(script.stop_ids) & set(talk.answers[0])


@pytest.mark.parametrize("name", ["chatml", "instruct", "labels"])
def test_a_conversation_reads_as_its_template_writes_it(name: str):
    script, tokenizer = script_of("bytes", name), tokenizer_of("bytes", name)
    session = hold(script, (2, 600, 3, 1))
    talk = Conversation(0, session, script)
    messages = []
    for turn in session.turns:
        talk.take_answer(turn.prompt_ids, turn.answer_ids)
        messages += [
            {
                "role": "user",
                "content": f"Which vault code begins with {turn.fact.name}? "
                "Answer with the whole code.",
            },
            {
                "role": "assistant",
                "content": f"The vault code is {turn.fact.name}-{turn.fact.number}",
            },
        ]
    said = text_of(tokenizer, talk.history)
    opening, _, context = text_of(tokenizer, session.context_ids).partition("Remember the codes")
    messages[0]["content"] = f"Remember the codes{context}\n\n" + messages[0]["content"]
    written = tokenizer._tokenizer.apply_chat_template(messages, tokenize=False)
    if name == "instruct":
        # A model that ends its message does not say the space that the template has there.
        said = said.replace("</s>", " </s>")
    assert written.startswith(opening)
    assert written.startswith(said)
    assert len(written) - len(said) <= 1, "all but a line's end"


def test_plain_text_begins_with_bos_where_there_is_one_and_asks_on_lines_of_their_own():
    script, tokenizer = script_of("bytes", "plain"), tokenizer_of("bytes", "plain")
    session = hold(script, (3, 500, 2, 1))
    assert session.context_ids[0] == tokenizer.first_ids[0]
    first, second = (text_of(tokenizer, turn.prompt_ids) for turn in session.turns)
    assert first.startswith("\n\nQuestion: Which vault code")
    assert second.startswith("Question: Which vault code")
    assert tokenizer.encode("\n")[0] in script.stop_ids
    script, tokenizer = script_of(NO_BOS, "plain"), tokenizer_of(NO_BOS, "plain")
    assert tokenizer.first_ids == ()
    session = hold(script, (3, 500, 2, 1))
    assert not set(tokenizer.special_tokens().values()).intersection(session.context_ids)


@given(st.integers(0, 2**32 - 1), st.integers(13, 700))
@settings(max_examples=20)
def test_recall_sessions_keep_their_length_and_judge_their_own_answers(seed: int, tokens: int):
    script = RecallScript()
    session = hold(script, (seed, tokens, 2, 3))
    assert len(session.context_ids) == tokens
    for turn in (turn for branch in session.branches for turn in branch):
        right = turn.expected([])
        assert script.judge(right, [*right, *script.closing_ids]) == 1
        assert script.judge(right, right[:-1]) == pytest.approx(7 / 8)
        assert len(turn.prompt_ids) == script.lengths.prompt


def test_a_context_without_room_for_a_fact_is_refused_by_name():
    for script in (RecallScript(), script_of("bytes", "chatml")):
        with pytest.raises(SizeError, match="--len: expected at least") as caught:
            hold(script, (0, 11, 1, 1))
        least = int(re.findall(r"at least (\d+)", str(caught.value))[0])
        assert len(hold(script, (0, least, 1, 1)).context_ids) == least


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "with a tokenizer"),
        ("{{ raise_exception('no') }}", "takes these messages"),
        ("{{ messages[0]['role'] }}", "every message once"),
    ],
)
def test_a_directory_that_cannot_be_spoken_to_is_refused_by_name(
    tmp_path: Path, template, expected
):
    if template is None:
        (tmp_path / "tokenizer.json").write_text("{}")
    else:
        write_tokenizer(tmp_path, template=template)
    with pytest.raises(UsageError, match=f"--model-path: .*{expected}"):
        open_script("text", str(tmp_path))

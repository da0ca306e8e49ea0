"""Traces of requests: read, put into tokens behind their prefix, and split by group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_models import CHATML, write_tokenizer

from kvtier.errors import TracesFileError, UsageError
from kvtier.memory.traces import Trace, read_traces, split, system_prefix, tokenized
from kvtier.synthetic.tokenizer import Tokenizer

PREFIX = "You sort letters. Put every letter into its box.\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer(str(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), template=CHATML)))


def written(folder: Path, *lines: object) -> Path:
    file = folder / "traces.jsonl"
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(text))
    return file


def test_texts_follow_the_prefix_token_by_token(tmp_path, tokenizer):
    lines = [{"prompt": f"Letter {n} is for me.", "answer": f"box {n}"} for n in range(3)]
    traced = read_traces(written(tmp_path, *lines, ""), PREFIX, tokenizer)
    for trace, line in zip(traced.traces, lines, strict=True):
        ids = [*traced.prefix_ids, *trace.prompt_ids]
        assert ids == [*tokenizer.added_ids, *tokenizer.encode(PREFIX + line["prompt"])]
        assert tokenizer.decode(trace.answer_ids) == line["answer"]


def test_a_token_that_joins_prefix_and_request_is_not_the_prefixs(tokenizer):
    """One of the requests goes on with the prefix's last word."""
    prefix = "The letter is for th"
    texts = [("1", "e captain", "", ""), ("2", "\nme", "", "")]
    traced = tokenized(texts, prefix, tokenizer)
    alone = tokenizer.encode(prefix)
    whole = tokenizer.encode(prefix + "e captain")
    assert whole[: len(alone)] != alone
    assert len(traced.prefix_ids) < len(alone)
    for (_, prompt, _, _), trace in zip(texts, traced.traces, strict=True):
        ids = tokenizer.encode(prefix + prompt)
        assert [*traced.prefix_ids, *trace.prompt_ids] == ids


def test_conversations_have_the_prefix_as_their_system_message(tmp_path, tokenizer):
    messages = [
        {"role": "user", "content": "Where does it go?"},
        {"role": "assistant", "content": "Into the box."},
        {"role": "user", "content": "Which?"},
        {"role": "assistant", "content": "The red one."},
    ]
    file = written(tmp_path, {"messages": messages}, {"messages": messages[:1]})
    traced = read_traces(file, PREFIX, tokenizer, chat=True)
    whole = tokenizer.render_chat([{"role": "system", "content": PREFIX}, *messages[:3]])
    first, second = traced.traces
    ids = tokenizer.encode(whole)
    assert [*traced.prefix_ids, *first.prompt_ids] == ids
    assert tokenizer.decode(first.answer_ids) == "The red one."
    assert second.answer_ids == ()
    # The text that begins every first message of a user is shared, too.
    assert tokenizer.decode(traced.prefix_ids).split()[-2:] == ["box.", "user"]
    assert system_prefix(PREFIX, tokenizer) in whole


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ({"prompt": "a", "wrong": 1}, "line 2: expected `prompt`"),
        ({"prompt": "a", "messages": []}, "line 2: expected `prompt`"),
        ({"answer": "a"}, "line 2: expected `prompt`"),
        ({"prompt": 3}, "line 2, prompt: expected a text"),
        ({"prompt": "a", "group": None}, "line 2, group: expected a text"),
        ({"prompt": ""}, "line 2: expected a prompt of at least one token"),
        ({"messages": [{"role": "user"}]}, "line 2, messages: expected a list"),
        ({"messages": []}, "line 2, messages: expected turns"),
        ({"messages": [{"role": "system", "content": "no"}]}, "messages: expected no system"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path, tokenizer, line, where):
    file = written(tmp_path, {"prompt": "Letter."}, line)
    with pytest.raises(TracesFileError, match=where.replace("`", ".")):
        read_traces(file, PREFIX, tokenizer)


def test_files_without_traces_are_refused(tmp_path, tokenizer):
    with pytest.raises(TracesFileError, match="at least one trace"):
        read_traces(written(tmp_path, ""), PREFIX, tokenizer)
    with pytest.raises(TracesFileError, match="a readable file"):
        read_traces(tmp_path / "none.jsonl", PREFIX, tokenizer)


@given(
    groups=st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=60),
    share=st.floats(0.05, 0.9),
    seed=st.integers(0, 5),
    named=st.booleans(),
)
def test_no_group_is_on_both_sides_of_a_split(groups, share, seed, named):
    """Without a name equal prompts are a group."""
    traces = [
        Trace((number,), (), group) if named else Trace((ord(group),), (number,))
        for number, group in enumerate(groups)
    ]
    if len(set(groups)) < 2:
        with pytest.raises(UsageError, match="two requests that differ"):
            split(traces, share, seed)
        return
    first, second = split(traces, share, seed)
    assert first
    assert second
    mine, theirs = ({groups[traces.index(trace)] for trace in side} for side in (first, second))
    assert not mine & theirs
    assert sorted([*first, *second], key=traces.index) == traces

"""Recorded sessions of agents become the turns that a server would see."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from text_models import CHATML, write_tokenizer

from kvtier.errors import UsageError
from kvtier.synthetic.tokenizer import Tokenizer
from kvtier.traffic.transcripts import read_transcripts, turns_of

CALL = {"function": {"name": "get_user", "arguments": '{"id": "mia"}'}, "id": "1", "type": "x"}
SESSION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Who is "}, {"text": "mia?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "A traveller.", "tool_call_id": "1"},
    {"role": "assistant", "content": "A traveller."},
    {"role": "user", "content": "Thanks."},
]
TOOL = {"type": "function", "function": {"name": "get_user", "parameters": {"type": "object"}}}
# A template of a model that is trained to call tools: it writes definitions and calls.
CALLING = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }}"
    "{% for name, value in call.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}]"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The template of a model that thinks does not write earlier answers as they were said.
THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


def tokenizer_of(folder: Path, template: str) -> Tokenizer:
    return Tokenizer(str(write_tokenizer(folder, template=template, eos="<|im_end|>")))


def texts(folder: Path, template: str, given: Any = SESSION) -> list[tuple[str, str]]:
    """The last 60 characters of each prompt, and the answer."""
    file = folder / "sessions.json"
    file.write_text(json.dumps([given]))
    tokenizer = tokenizer_of(folder, template)
    (transcript,) = read_transcripts(file)
    turns = turns_of(transcript, tokenizer)
    return [
        (tokenizer.decode(turn.prompt_ids)[-60:], tokenizer.decode(turn.answer_ids))
        for turn in turns
    ]


def test_every_answer_is_a_turn_and_calls_are_text_where_a_template_knows_of_none(tmp_path):
    first, second = texts(tmp_path, CHATML)
    assert first[0].endswith("Who is mia?\nassistant\n")
    assert first[1] == '<tool_call>{"name": "get_user", "arguments": {"id": "mia"}}</tool_call>'
    assert second[0].endswith("</tool_call>\ntool\nA traveller.\nassistant\n")
    assert second[1] == "A traveller."
    # A session grows by what is appended to it.
    tokenizer = tokenizer_of(tmp_path, CHATML)
    one, other = turns_of(read_transcripts(tmp_path / "sessions.json")[0], tokenizer)
    said = [*one.prompt_ids, *one.answer_ids]
    assert other.prompt_ids[: len(said)] == said
    # An answer ends with what ends it.
    assert other.answer_ids[-1:] == list(tokenizer.eos_ids)


def test_a_template_that_knows_of_calls_writes_them_and_the_tools(tmp_path):
    first, second = texts(tmp_path, CALLING, {"messages": SESSION, "tools": [TOOL]})
    assert first[0].startswith("<tools>get_user")
    assert first[1] == "[get_user id=mia]"
    assert second[0].endswith("[get_user id=mia]\ntool\nA traveller.\nassistant\n")


def test_an_answer_that_a_template_writes_otherwise_is_taken_as_it_was_said(tmp_path):
    assert [answer for _, answer in texts(tmp_path, THINKING)][1] == "A traveller."


@pytest.mark.parametrize("form", ["list", "lines", "gzip", "trajectories"])
def test_a_file_is_a_list_or_has_one_transcript_a_line(tmp_path, form):
    file = tmp_path / ("sessions.json.gz" if form == "gzip" else "sessions.json")
    every = [SESSION, SESSION[:3]]
    if form == "lines":
        file.write_text("".join(json.dumps({"messages": one}) + "\n" for one in every))
    elif form == "trajectories":
        file.write_text(json.dumps([{"traj": one, "reward": 1.0} for one in every]))
    else:
        text = json.dumps(every).encode()
        file.write_bytes(gzip.compress(text) if form == "gzip" else text)
    assert [len(one.messages) for one in read_transcripts(file)] == [6, 3]


BAD_CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}
PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no JSON", "line 1: expected a JSON object"),
        ('[[], [{"content": "no role"}]]', "transcript 2, 0.role: expected messages in OpenAI's"),
        ('[{"other": []}]', "transcript 1: expected messages"),
        ('[{"messages": []', "is cut off"),
        ('{"messages": 5}\n', "line 1: expected messages"),
        (json.dumps([[BAD_CALL]]), "transcript 1: expected arguments of a tool in JSON"),
        (json.dumps([[PICTURE]]), "transcript 1, 0.content"),
        (json.dumps([{"messages": SESSION, "tools": "get_user"}]), "transcript 1: expected"),
    ],
)
def test_what_holds_no_transcripts_is_refused_by_its_place(tmp_path, text, expected):
    file = tmp_path / "sessions.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=expected):
        read_transcripts(file)


def test_a_file_that_is_not_there_and_a_broken_gzip_are_named(tmp_path):
    file = tmp_path / "sessions.json.gz"
    for content in (None, gzip.compress(b"[]", mtime=0)[:-9]):
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(UsageError, match=r"^--transcripts: expected a readable file"):
            read_transcripts(file)


def test_a_model_without_a_chat_template_is_refused(tmp_path):
    file = tmp_path / "sessions.json"
    file.write_text(json.dumps([SESSION]))
    tokenizer = Tokenizer(str(write_tokenizer(tmp_path)))
    with pytest.raises(UsageError, match="a model with a chat template"):
        turns_of(read_transcripts(file)[0], tokenizer)

"""Recorded sessions of agents, with their texts, as the turns that a server would see.

A file holds transcripts as one JSON list, or one a line. A transcript is a list of messages in
OpenAI's format, or an object that has it as `messages` (and perhaps `tools`) or, like those of
tau-bench, as `traj`. A file whose name ends with .gz is decompressed.

    │ system │ user │ assistant │ tool │ assistant │ …
    └─ prompt of 1 ─┘└ answer 1 ┘
    └────────── prompt of turn 2 ──────┘└ answer 2 ┘

The model's chat template writes messages. A template that knows of no tool calls is given them as
text, in the Hermes format: <tool_call>{"name": …, "arguments": …}</tool_call>.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from kvtier.errors import TracesFileError, UsageError
from kvtier.reading import parse_json, read_json_lines, read_text
from kvtier.synthetic.tokenizer import Tokenizer

ARGUMENT = "--transcripts"


class Call(BaseModel):
    """The call of a tool. arguments: JSON."""

    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    function: Call


class Part(BaseModel):
    """A part of a message's content that is text."""

    text: str


class Message(BaseModel):
    """A message in OpenAI's format; further fields are for the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    @property
    def text_with_calls(self) -> str:
        """Return the content, and a line for each tool that is called."""
        calls = [
            f'<tool_call>{{"name": "{call.function.name}", "arguments": {call.function.arguments}}}'
            "</tool_call>"
            for call in self.tool_calls or ()
        ]
        return "\n".join([*([self.text] if self.text else []), *calls])


class Transcript(NamedTuple):
    """A session. tools: their definitions in OpenAI's format, where the file has them."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


class Turn(NamedTuple):
    """One request of a session: the ids of its prompt and of the answer that was recorded."""

    prompt_ids: list[int]
    answer_ids: list[int]


def read_transcripts(file: Path) -> list[Transcript]:
    """Return a file's transcripts. Raises UsageError naming `--transcripts` where there is no such
    file, and TracesFileError naming line or transcript, and field, where it is malformed."""
    text = read_text(file, ARGUMENT)
    found: Iterable[tuple[str, Any]]
    if text.lstrip().startswith("["):
        document = parse_json(f'{{"all": {text}}}'.encode(), str(file), TracesFileError)["all"]
        found = [(f"{file}, transcript {number}", one) for number, one in enumerate(document, 1)]
    else:
        found = read_json_lines(file, ARGUMENT, TracesFileError)
    return [_transcript(where, one) for where, one in found]


def turns_of(transcript: Transcript, tokenizer: Tokenizer) -> list[Turn]:
    """Return a session's turns, one for each answer. Raises UsageError for a model without a chat
    template, and for one whose template refuses the messages."""
    if not tokenizer.has_chat_template:
        raise UsageError("--model-path", "a model with a chat template", tokenizer.model_path)
    chat = written(transcript.messages, takes_calls=tokenizer.takes_tool_calls)
    turns = []
    for index, message in enumerate(transcript.messages):
        if message.role != "assistant" or not message.text_with_calls:
            continue
        prompt = tokenizer.render_chat(chat[:index], tools=transcript.tools)
        whole = tokenizer.render_chat(chat[: index + 1], tools=transcript.tools, answers=False)
        # Templates that change what stands before do not write an answer as it was generated.
        answer = whole[len(prompt) :] if whole.startswith(prompt) else message.text_with_calls
        turns.append(Turn(tokenizer.encode(prompt), _until_its_end(tokenizer, answer)))
    return turns


def written(messages: Sequence[Message], *, takes_calls: bool) -> list[dict[str, Any]]:
    """Return messages as a chat template takes them. takes_calls: whether it knows of tool calls,
    whose arguments are objects there."""
    if not takes_calls:
        return [{"role": one.role, "content": one.text_with_calls} for one in messages]
    chat = []
    for one in messages:
        shown = one.model_dump(exclude_none=True) | {"content": one.text}
        for call in shown.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        chat.append(shown)
    return chat


def _until_its_end(tokenizer: Tokenizer, answer: str) -> list[int]:
    """Return the ids of an answer up to and with its end token; templates write more behind it."""
    ids = tokenizer.encode(answer)
    ends = [ids.index(end) for end in tokenizer.eos_ids if end in ids]
    return ids[: min(ends) + 1] if ends else ids


def _transcript(where: str, given: Any) -> Transcript:
    tools = None
    if isinstance(given, dict):
        tools = given.get("tools")
        given = given.get("messages", given.get("traj"))
    try:
        messages = TypeAdapter(list[Message]).validate_python(given)
        tools = TypeAdapter(list[dict[str, Any]] | None).validate_python(tools)
        for message in messages:
            for call in message.tool_calls or ():
                json.loads(call.function.arguments or "{}")
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        place = ", ".join([where, *([".".join(map(str, found["loc"]))] if found["loc"] else [])])
        raise TracesFileError(place, "messages in OpenAI's format", found["input"]) from error
    except ValueError as error:
        raise TracesFileError(where, "arguments of a tool in JSON", str(error)) from error
    return Transcript(messages, tools)

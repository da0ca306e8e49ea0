"""The frame around questions and answers: a chat template's tokens, or plain labels.

    opening TEXT first Q1 reply │A1 closing│ following Q2 reply │A2 closing│ following Q3 reply …
    └────── user ──────┘                     between the bars: what a model says, and what ends it

A template is rendered twice, with marks for the messages, and cut at the marks. Each part is later
said once, behind what was really generated: a conversation only ever grows.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import UsageError
from kvtier.synthetic.tokenizer import Tokenizer

# Words that no template looks at.
_FIRST, _ANSWER, _SECOND = "FIRSTMESSAGE", "FIRSTANSWER", "SECONDMESSAGE"


@dataclass(frozen=True)
class Frame:
    """See the module docstring. closing: the text that ends a message, one of `stop_ids`."""

    opening: str
    first: str
    reply: str
    closing: str
    following: str
    stop_ids: tuple[int, ...]


def frame_of(tokenizer: Tokenizer) -> Frame:
    """Return the frame of the tokenizer's chat template, or plain text where it has none. Raises
    UsageError."""
    return chat_frame(tokenizer) if tokenizer.has_chat_template else plain_frame(tokenizer)


def plain_frame(tokenizer: Tokenizer) -> Frame:
    """Questions and answers on lines of their own; a line's end ends an answer."""
    newline = tokenizer.encode("\n")
    stops = {*tokenizer.eos_ids, *(newline if len(newline) == 1 else ())}
    return Frame(
        opening="",
        first="\n\nQuestion: ",
        reply="\nAnswer: ",
        closing="\n",
        following="Question: ",
        stop_ids=tuple(sorted(stops)),
    )


def chat_frame(tokenizer: Tokenizer) -> Frame:
    """The parts of a chat template. Raises UsageError when messages do not come back as given."""
    user, assistant = {"role": "user"}, {"role": "assistant"}
    one = [{**user, "content": _FIRST}]
    two = [*one, {**assistant, "content": _ANSWER}, {**user, "content": _SECOND}]
    opening, reply = _cut(tokenizer, tokenizer.render_chat(one), _FIRST)
    _, before, between, _ = _cut(tokenizer, tokenizer.render_chat(two), _FIRST, _ANSWER, _SECOND)
    if before.rstrip() == reply.rstrip():
        reply = before  # with the space that stands in front of an answer
    specials = tokenizer.special_tokens()
    # A model does not say what a template writes in front of the token that ends a message.
    ending = between.lstrip()
    closing = max((text for text in specials if ending.startswith(text)), key=len, default="")
    stops = {*tokenizer.eos_ids, *((specials[closing],) if closing else ())}
    return Frame(
        opening=opening,
        first="\n\n",
        reply=reply,
        closing=closing,
        following=ending[len(closing) :] if closing else between,
        stop_ids=tuple(sorted(stops)),
    )


def _cut(tokenizer: Tokenizer, text: str, *marks: str) -> list[str]:
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found or mark in text:
            expected = "a model whose chat template writes every message once"
            raise UsageError("--model-path", expected, tokenizer.model_path)
        parts.append(before)
    return [*parts, text]

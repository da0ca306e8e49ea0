"""The measurements of a check, turn by turn, and their figures.

Losses are nats. The worth kept is how much of what the context tells about the recorded answers is
still there: (bare - kept) / (bare - full), over all turns behind the first. Agreement is of what
full KV says itself, greedily: how many of its tokens the server says in the same place, and how
many of its tool calls it makes token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel


class CalledTool(BaseModel):
    """A tool call that full KV makes. same_name, same: whether the server's greedy answer is the
    same up to the end of the tool's name, and of the whole call."""

    name: str
    same_name: bool
    same: bool


class TurnResult(BaseModel):
    """A turn of a session, both counted from 1.

    prompt_tokens, held_tokens: of the prompt, and how many of them the session had before
    answer_tokens:              of the recorded answer
    full, kept, bare:           its loss in all, nats: with full KV, with what the server keeps, and
                                without most of what the session had before
    said_tokens, same_tokens:   of the answer of full KV, and how many are the server's, too, each
                                behind those before it
    same_answer:                whether all of them are
    """

    session: int
    turn: int
    prompt_tokens: int
    held_tokens: int
    answer_tokens: int
    full: float
    kept: float
    bare: float
    said_tokens: int
    same_tokens: int
    same_answer: bool
    calls: list[CalledTool]


class Figures(BaseModel):
    """None where there is nothing to measure it on.

    worth:      of the context's worth that is kept
    agreement:  share of the tokens of full KV's answers that the server gives, too
    answers:    share of those answers that are the same to their end
    names, calls: share of their tool calls of the same name, and of the same name and arguments
    """

    turns: int
    worth: float | None
    agreement: float | None
    answers: float | None
    tool_calls: int
    names: float | None
    calls: float | None


class Document(BaseModel):
    """The outcome of a check. settings: kvtier's that were not left to their defaults."""

    model: str
    transcripts: str
    settings: dict[str, Any]
    figures: Figures
    turns: list[TurnResult]


def figures_of(turns: Sequence[TurnResult]) -> Figures:
    """Return what turns come to; a session's first holds nothing that was compressed."""
    later = [one for one in turns if one.turn > 1]
    calls = [call for one in later for call in one.calls]
    told = sum(one.bare - one.full for one in later)
    said = sum(one.said_tokens for one in later)
    return Figures(
        turns=len(later),
        worth=sum(one.bare - one.kept for one in later) / told if told > 0 else None,
        agreement=sum(one.same_tokens for one in later) / said if said else None,
        answers=_share(later, lambda one: one.same_answer),
        tool_calls=len(calls),
        names=_share(calls, lambda call: call.same_name),
        calls=_share(calls, lambda call: call.same),
    )


def _share(found: Sequence[Any], holds: Callable[[Any], bool]) -> float | None:
    return sum(map(holds, found)) / len(found) if found else None

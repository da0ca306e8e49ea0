"""The script of a session, whatever language it is in: the interface of a workload.

    context      [ opening … facts in filler … ]
    main line    context | turn 1 | answer 1 | turn 2 | answer 2 …   answers: what was generated
    branches                                 └ question | answer     more questions, same prefix

A prompt is always the ids said so far and a turn's own ids behind them, so that what was said is a
prefix of what comes, token for token. A script is immutable; equal random numbers give equal
sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


class Turn(Protocol):
    """One question."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The ids that follow everything said before, up to where the answer begins."""
        ...

    def expected(self, answers_so_far: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        """The right answer's ids, given what the model said in turns 0, 1, … without stop ids; None
        where there is no right one."""
        ...


@dataclass(frozen=True)
class ScriptedSession:
    """A context, its turns, and per turn the questions that branch off after its answer."""

    context_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    branches: tuple[tuple[Turn, ...], ...]


class Lengths(NamedTuple):
    """Tokens of a turn at most. prompt: the question; answer: what may be generated, and what
    closes it."""

    prompt: int
    answer: int


class Script(Protocol):
    """A language that sessions are written in.

    recall_means: what recall is a share of, for people
    lengths:      how long turns may become
    max_answer:   tokens that may be generated as an answer
    stop_ids:     any of them ends an answer, and is its last token
    closing_ids:  end an answer that was cut short
    unscored:     first tokens of a right answer that repeat the question
    warm_up_ids:  tokens to warm an engine up with
    """

    recall_means: str
    lengths: Lengths
    max_answer: int
    stop_ids: tuple[int, ...]
    closing_ids: tuple[int, ...]
    unscored: int
    warm_up_ids: tuple[int, ...]

    def check_context(self, context_tokens: int) -> None:
        """Raise SizeError naming `--len` for a context in which no fact fits."""
        ...

    def session(
        self, rng: np.random.Generator, context_tokens: int, turns: int, questions: int
    ) -> ScriptedSession:
        """A session whose context has exactly so many tokens. questions: per turn, the turn's own
        and branches. Raises SizeError as `check_context` does."""
        ...

    def judge(self, right: Sequence[int], given: Sequence[int]) -> float:
        """Return the recall: how much of the right answer a generated one has, stop id or not, in
        [0, 1]."""
        ...

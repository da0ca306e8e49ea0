"""The load of the fault benchmark: many short sessions whose KV has to come back every turn.

Requests come in rounds. A round opens VISITS visits of sessions; every visit's first turn is asked,
then every second turn, and so on. The device has room for fewer visits than that, so a visit's
history is gone when its next turn comes and is restored from the tier, or computed again.

    visit a   [ context Q1 ] A1 ───────────── [ … Q2 ] A2 ───────────── [ … Q3 ] A3
    visit b                 [ context Q1 ] A1 ─────────── [ … Q2 ] A2

A visit has a cache salt of its own, so its KV is no other visit's and all of it is put, while its
tokens are those of every other visit of the session: what they have to be is known beforehand.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from kvtier.synthetic.recall import DEFAULT_LANGUAGE, make_session

TURNS = 4
FACTS = 16
# Shorter ones are computed as fast as they are loaded, and the engine would not ask for them.
SHORTEST, LONGEST = 1000, 2000


class LoadSession(BaseModel):
    """A context and its questions, in order; right[i] is what was hidden in the context."""

    model_config = ConfigDict(frozen=True)

    context_ids: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    right: tuple[tuple[int, ...], ...]


Answers = list[list[list[int]]]  # the tokens that were said, by session and turn


class Asked(NamedTuple):
    """One request: a turn of a session, under its visit's salt."""

    session: int
    turn: int
    salt: str


@dataclass
class Book:
    """The sessions, and what their turns have to answer, as far as it is known."""

    sessions: Sequence[LoadSession]
    answers: Answers

    def prompt(self, asked: Asked) -> list[int]:
        """Context, the turns before with their answers, and the question."""
        session = self.sessions[asked.session]
        ids = list(session.context_ids)
        for turn in range(asked.turn):
            answer = self.answers[asked.session][turn]
            ids += [*session.prompts[turn], *answer]
            if answer[-1] != DEFAULT_LANGUAGE.eot:
                ids.append(DEFAULT_LANGUAGE.eot)
        return [*ids, *session.prompts[asked.turn]]


def make_sessions(count: int, seed: int) -> list[LoadSession]:
    """Sessions of contexts of SHORTEST to LONGEST tokens. Session i depends on seed and i only."""
    sessions = []
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        tokens = int(rng.integers(SHORTEST, LONGEST + 1))
        made = make_session(rng, tokens, TURNS, FACTS, invented_share=0.0)
        sessions.append(
            LoadSession(
                context_ids=tuple(made.context_ids.tolist()),
                prompts=tuple(turn.prompt_ids for turn in made.turns),
                right=tuple(turn.answer_ids or () for turn in made.turns),
            )
        )
    return sessions


def requests(sessions: int, visits: int, seed: int, name: str) -> Iterator[Asked]:
    """Requests without end, `visits` visits at a time. name: of the load; makes its salts its
    own."""
    chance = random.Random(seed)
    number = 0
    while True:
        opened = []
        for _ in range(visits):
            opened.append((chance.randrange(sessions), f"{name}-{number}"))
            number += 1
        for turn in range(TURNS):
            for session, salt in opened:
                yield Asked(session, turn, salt)

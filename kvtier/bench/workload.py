"""The sessions of a workload: what is asked when, decided before any engine starts.

    main line:   context Q1 A1 | Q2 A2 | Q3 A3 …      A: the tokens the model really produced
    branches:             └ Q1' A1'  └ Q2' A2'        more questions on the same prefix, for recall

Every answer has a known right one, except where the model is asked to invent one (see recall.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtier.bench.schema import Workload
from kvtier.synthetic.recall import (
    ANSWER_TOKENS,
    FACT_TOKENS,
    PROMPT_TOKENS,
    Fact,
    Session,
    Turn,
    make_session,
)

EXCHANGE_TOKENS = PROMPT_TOKENS + ANSWER_TOKENS
MAX_SESSION_FACTS = 64


@dataclass(frozen=True)
class PlannedSession:
    """A recall session and, per turn, the questions that branch off after its answer."""

    session: Session
    branches: tuple[tuple[Turn, ...], ...]


def turn_tokens(workload: Workload) -> int:
    """Tokens all turns of one session add to the cache, branches included."""
    return workload.turns * workload.questions * EXCHANGE_TOKENS


def longest_prompt(workload: Workload) -> int:
    """Positions the longest request of a session reaches, answer included."""
    branch = EXCHANGE_TOKENS if workload.questions > 1 else 0
    return workload.context_tokens + workload.turns * EXCHANGE_TOKENS + branch


def plan_sessions(workload: Workload) -> list[PlannedSession]:
    """The sessions of a workload. Session i depends on the seed and i only."""
    return [_plan_session(workload, index) for index in range(workload.sessions)]


def _plan_session(workload: Workload, index: int) -> PlannedSession:
    rng = np.random.default_rng([workload.seed, index])
    room = (workload.context_tokens - 1) // FACT_TOKENS
    num_facts = max(1, min(MAX_SESSION_FACTS, room // 2))
    session = make_session(rng, workload.context_tokens, workload.turns, num_facts)
    asked = {turn.name for turn in session.turns}
    spare = [fact for fact in session.facts if fact.name not in asked] or list(session.facts)
    order: list[int] = []
    branches = []
    for _ in range(workload.turns):
        questions = []
        for _ in range(workload.questions - 1):
            order = order or rng.permutation(len(spare)).tolist()
            questions.append(_question(rng, session, spare[order.pop()]))
        branches.append(tuple(questions))
    return PlannedSession(session, tuple(branches))


def _question(rng: np.random.Generator, session: Session, fact: Fact) -> Turn:
    """A question like those of the session itself."""
    language = session.language
    filler = language.filler_walk(rng, PROMPT_TOKENS - 4).tolist()
    prompt = (language.user, *filler, *fact.name, language.assistant)
    return Turn(prompt, fact.name, fact.answer_ids, fact_position=fact.position)

"""Sessions of the recall language as a script: for models whose vocabulary is that language's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.errors import SizeError
from kvtier.synthetic.recall import (
    ANSWER_TOKENS,
    DEFAULT_LANGUAGE,
    FACT_TOKENS,
    PROMPT_TOKENS,
    Turn,
    make_session,
    question_about,
    score_answer,
)
from kvtier.synthetic.script import Lengths, ScriptedSession

MAX_SESSION_FACTS = 64
# Long enough to touch every code path, short enough to cost nothing.
WARM_UP_TOKENS = 64


class RecallScript:
    """See the module docstring and `Script`.

    Every answer has a known right one, except where the model is asked to invent one (recall.py).
    """

    recall_means = "share of code words right"
    lengths = Lengths(PROMPT_TOKENS, ANSWER_TOKENS)
    max_answer = ANSWER_TOKENS
    stop_ids: tuple[int, ...] = (DEFAULT_LANGUAGE.eot,)
    closing_ids: tuple[int, ...] = (DEFAULT_LANGUAGE.eot,)
    # An answer begins with the two words of the name that was asked for.
    unscored = 2
    warm_up_ids: tuple[int, ...] = (
        DEFAULT_LANGUAGE.bos,
        *DEFAULT_LANGUAGE.filler[:WARM_UP_TOKENS],
    )

    def check_context(self, context_tokens: int) -> None:
        if context_tokens < 1 + FACT_TOKENS:
            raise SizeError("--len", f"at least {1 + FACT_TOKENS} tokens", context_tokens)

    def session(
        self, rng: np.random.Generator, context_tokens: int, turns: int, questions: int
    ) -> ScriptedSession:
        self.check_context(context_tokens)
        room = (context_tokens - 1) // FACT_TOKENS
        num_facts = max(1, min(MAX_SESSION_FACTS, room // 2))
        session = make_session(rng, context_tokens, turns, num_facts)
        asked = {turn.name for turn in session.turns}
        spare = [fact for fact in session.facts if fact.name not in asked] or list(session.facts)
        order: list[int] = []
        branches: list[tuple[Turn, ...]] = []
        for _ in range(turns):
            asked_now = []
            for _ in range(questions - 1):
                order = order or rng.permutation(len(spare)).tolist()
                asked_now.append(question_about(rng, spare[order.pop()]))
            branches.append(tuple(asked_now))
        return ScriptedSession(tuple(session.context_ids.tolist()), session.turns, tuple(branches))

    def judge(self, right: Sequence[int], given: Sequence[int]) -> float:
        return score_answer(right, given)

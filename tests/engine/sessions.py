"""Sessions of several turns, as engines are asked them and answer; see engine_runner.py."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

Prompt = list[int]
Rounds = list[list[dict[str, Any]]]


def tokens(rng: random.Random, count: int) -> Prompt:
    return [rng.randrange(6, 384) for _ in range(count)]


def side_by_side(sessions: Sequence[Sequence[Prompt]], new_tokens: int, **asked: Any) -> Rounds:
    """A round a turn, of all sessions at once. sessions: the prompts of each one's turns; asked:
    more of each request."""
    rounds: Rounds = []
    for turn, prompts in enumerate(zip(*sessions, strict=True)):
        requests = [{"input_ids": one, "max_new_tokens": new_tokens, **asked} for one in prompts]
        for index, request in enumerate(requests):
            if turn:
                request["continues"] = [turn - 1, index]
        rounds.append(requests)
    return rounds


def one_by_one(sessions: Sequence[Sequence[Prompt]], new_tokens: int, **asked: Any) -> Rounds:
    """The same requests in the same order, each a round of its own."""
    rounds = [[one] for requests in side_by_side(sessions, new_tokens, **asked) for one in requests]
    for earlier, (request,) in enumerate(rounds[len(sessions) :]):
        request["continues"] = [earlier, 0]
    return rounds


def said(out: dict[str, Any]) -> list[list[Prompt]]:
    """The answers of each round, of an engine that ended with sound accounts."""
    assert out["state"]["integrity"] == []
    return [[one["output_ids"] for one in requests] for requests in out["rounds"]]


def said_in(out: dict[str, Any], sessions: int) -> list[list[Prompt]]:
    """The answers of each session, of rounds of one turn or of one request."""
    answers = [answer for round_ in said(out) for answer in round_]
    return [answers[session::sessions] for session in range(sessions)]

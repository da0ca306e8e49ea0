"""Requests that have nothing to do with anybody's prefix: what a memory's gate is to turn away."""

from __future__ import annotations

import random

from kvtier.heads.samples.synthetic import speaks_recall
from kvtier.memory.traces import Trace, system_prefix
from kvtier.synthetic.tokenizer import Tokenizer

_THINGS = (
    "a bicycle", "bread", "a lighthouse", "the moon", "an orchard", "a violin", "snow", "a river",
    "glass", "a library", "thunder", "a market", "honey", "a bridge", "sleep", "a garden",
)  # fmt: skip
_QUESTIONS = (
    ("What is {} good for?", "People have used {} for a long time, and it is useful in many ways."),
    ("Write one sentence about {}.", "Everybody in the village was very fond of {}."),
    ("Why do children ask about {}?", "Children are curious, and {} is something that they see."),
    ("Describe {} to somebody blind.", "It is easy to feel and to hear what {} is like."),
)
# The length of requests in the recall language in tokens, and how many of them are the answer.
_RECALL_TOKENS, _RECALL_ANSWER = 30, 6


def off_topic_requests(tokenizer: Tokenizer, model_path: str, count: int, seed: int) -> list[Trace]:
    """Return at most so many requests, all different; in the model's chat template where it has
    one."""
    rng = random.Random(seed)
    if speaks_recall(model_path):
        ids = sorted(set(range(6, 384)))
        drawn = [tuple(rng.choices(ids, k=_RECALL_TOKENS)) for _ in range(count)]
        return [Trace(one[:-_RECALL_ANSWER], one[-_RECALL_ANSWER:]) for one in drawn]
    pairs = [
        (question.format(thing), answer.format(thing))
        for thing in _THINGS
        for question, answer in _QUESTIONS
    ]
    rng.shuffle(pairs)
    return [
        Trace(
            tuple(tokenizer.encode(_as_turn(question, tokenizer))), tuple(tokenizer.encode(answer))
        )
        for question, answer in pairs[:count]
    ]


def _as_turn(question: str, tokenizer: Tokenizer) -> str:
    """A user's turn that follows a prefix, and where the assistant's begins."""
    if not tokenizer.has_chat_template:
        return f"\n{question}\n"
    system = "system"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return tokenizer.render_chat(messages)[len(system_prefix(system, tokenizer)) :]


__all__ = ["off_topic_requests"]

"""Requests that have nothing to do with any family: what a memory's gate should turn away.

General questions, small talk, sums and little writing tasks, each with a plain answer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from benchmarks.memory.families.family import NAMES, Request, chat, read_parts, words
from kvtier.errors import UsageError

Row = dict[str, str]


@dataclass(frozen=True)
class Topic:
    """Ways to ask, one answer, and the rows of words that fill both."""

    questions: tuple[str, ...]
    answer: str
    rows: tuple[Row, ...]


ANIMALS = words("fox cat bear frog horse rabbit lion mouse goat swan whale tiger")
# Rows that are made; the others stand in off_topic.txt.
MADE: Mapping[str, tuple[Row, ...]] = {
    "sums": tuple(
        {"a": str(a), "b": str(b), "sum": str(a + b), "product": str(a * b)}
        for a, b in product(range(2, 12), range(3, 13))
    ),
    "spelt": tuple(
        {"word": word, "letters": "-".join(word), "capitals": word.upper()}
        for word in words("giraffe planet violin ocean pepper island wizard rocket monkey castle")
    ),
    "names": tuple({"name": name} for name in NAMES),
    "animals": tuple({"one": a, "other": b} for a, b in product(ANIMALS, ANIMALS) if a != b),
}


def read_topic(questions: str, answer: str, *rows: str) -> Topic:
    """Read a topic. rows: the name of some that are made, or lines of `a:b of c:d e:f`, in which a
    low line stands for a space."""
    text = " ".join(rows)
    names, _, values = text.partition(" of ")
    told = MADE.get(text) or tuple(
        dict(zip(names.split(":"), each.replace("_", " ").split(":"), strict=True))
        for each in words(values)
    )
    return Topic(tuple(questions.split(" | ")), answer, told)


TOPICS = tuple(read_topic(*part) for part in read_parts("off_topic.txt"))


def off_topic_requests(seed: int, count: int) -> tuple[Request, ...]:
    """`count` requests with distinct prompts, of all topics in turn as long as each has some left.
    Raises UsageError where there are not as many."""
    most = sum(len(topic.rows) for topic in TOPICS)
    if not 0 <= count <= most:
        raise UsageError("count", f"0 … {most}", count)
    rng = random.Random(f"off topic {seed}")
    left = [(topic, rng.sample(topic.rows, len(topic.rows))) for topic in TOPICS]
    found: list[Request] = []
    while len(found) < count:
        left = [(topic, rows) for topic, rows in left if rows]
        for topic, rows in left:
            row, question = rows.pop(), rng.choice(topic.questions)
            found.append(chat(question.format(**row), topic.answer.format(**row), question))
    return tuple(found[:count])

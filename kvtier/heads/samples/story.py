"""The material of a text task: what is told, and what is asked about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# The number of questions of one context; fewer where a text has less to ask.
QUESTIONS = 12


class Asked(NamedTuple):
    """A question, how its answer begins, and how it goes on, which is what is scored.

    Where `question` is empty nobody is asked: the text itself goes on with `begun` and `answer`.
    """

    question: str
    begun: str
    answer: str


@dataclass(frozen=True)
class Story:
    """The text that fills a context, each piece with the space or the line break in front of it.

    filler: told in this order, without end
    facts:  told once each, at random places between pieces of the filler
    ask:    the questions, given all pieces that were told whole, in their order
    """

    filler: Iterator[str]
    facts: Sequence[str]
    ask: Callable[[list[str]], list[Asked]]


StoryTeller = Callable[[np.random.Generator, int], Story]
"""(random numbers, half of the texts to tell) -> story."""


def in_random_order(rng: np.random.Generator, found: Sequence[str]) -> list[str]:
    """The different texts of `found`."""
    different = list(dict.fromkeys(found))
    return [different[i] for i in rng.permutation(len(different))]

"""Tasks whose answer stands nowhere in the text, but in many places together.

many-shot   Oslo => blick … baker => fendle …    the label of a word like those labelled
common      … one vote for Oslo … for Lima …     what most votes go to (RULER's common words)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvtier.heads.samples.facts import CITIES, FIRST_NAMES, TRADES
from kvtier.heads.samples.story import QUESTIONS, Asked, Story
from kvtier.synthetic.prose import document, sentences
from kvtier.synthetic.words import NOUNS

LABELS = ("blick", "fendle", "gorp", "tass", "wug", "zib")
# Words of each kind that are asked and never shown.
HELD_BACK = QUESTIONS // 4
VOTES, VOTES_LOST = 6, 4


def many_shot(rng: np.random.Generator, half: int) -> Story:
    """Words of four kinds under invented labels; asked are words that were not labelled."""
    kinds = [rng.permutation(kind).tolist() for kind in (CITIES, TRADES, FIRST_NAMES, NOUNS)]
    labels = rng.permutation(LABELS).tolist()

    def shots() -> Iterator[str]:
        while True:
            kind = int(rng.integers(len(kinds)))
            shown = kinds[kind][HELD_BACK:]
            yield f"\n{shown[int(rng.integers(len(shown)))]} => {labels[kind]}"

    asked = [
        Asked("", f"\n{word} =>", f" {label}\n")
        for kind, label in zip(kinds, labels, strict=False)
        for word in kind[:HELD_BACK]
    ]
    return Story(shots(), (), lambda _: asked)


def common(rng: np.random.Generator, half: int) -> Story:
    """Votes on several things in prose; most of them name the same one."""
    polls = {"city": CITIES, "trade": TRADES, "name": FIRST_NAMES, "animal": NOUNS}
    facts, asked = list[str](), list[Asked]()
    for poll, choices in polls.items():
        winner, *others = (choices[i] for i in rng.permutation(len(choices)))
        votes = [winner] * VOTES + others[:VOTES_LOST]
        facts += [f" One vote for the best {poll} goes to {choice}." for choice in votes]
        asked.append(
            Asked(
                f"Which {poll} is voted the best?",
                f"Most votes for the best {poll} go to",
                f" {winner}.",
            )
        )
    return Story(sentences(document(rng, half)), facts, lambda _: asked)


__all__ = ["common", "many_shot"]

"""Tasks whose answer stands nowhere in the text, but in many places together.

many-shot   Oslo => blick … baker => fendle …      the label of a word like those that were labelled
common      tidy … owl … tidy … badger … tidy      the words that come most often (RULER)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvtier.heads.samples.facts import CITIES, FIRST_NAMES, TRADES
from kvtier.heads.samples.story import QUESTIONS, Asked, Story
from kvtier.synthetic.words import ADJECTIVES, NOUNS

LABELS = ("blick", "fendle", "gorp", "tass", "wug", "zib")
# Words of each kind that are asked and never shown.
HELD_BACK = QUESTIONS // 4
COMMON, OFTEN = 3, 0.5


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
        Asked(f"What is the label of {word}?", f"{word} =>", f" {label}")
        for kind, label in zip(kinds, labels, strict=False)
        for word in kind[:HELD_BACK]
    ]
    return Story(shots(), (), lambda _: asked)


def common(rng: np.random.Generator, half: int) -> Story:
    """Half of the words are three that come again and again, the rest comes seldom."""
    words: Sequence[str] = rng.permutation(ADJECTIVES + NOUNS).tolist()
    often, seldom = words[:COMMON], words[COMMON:]

    def drawn() -> Iterator[str]:
        while True:
            among = often if rng.random() < OFTEN else seldom
            yield f" {among[int(rng.integers(len(among)))]}"

    def ask(told: list[str]) -> list[Asked]:
        ranked = sorted(often, key=lambda word: -told.count(f" {word}"))
        question = f"Which {COMMON} words come most often, the most frequent first?"
        return [Asked(question, "The most frequent words are", f" {', '.join(ranked)}.")]

    return Story(drawn(), (), ask)


__all__ = ["common", "many_shot"]

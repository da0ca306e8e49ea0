"""Tasks on texts that people wrote: to quote them, to go on with them, to look up what they define.

quotation      a passage of the middle is begun, and its next words are wanted
continuation   nothing is asked: what the text itself says next
code           the parameters of a function whose source stands in the middle
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from kvtier.heads.samples.story import QUESTIONS, Asked, Story, in_random_order
from kvtier.synthetic.code import Function, functions
from kvtier.synthetic.prose import document, sentences

CUE_WORDS, QUOTED_WORDS = 9, 8
# Characters are more than enough for as many tokens as are scored.
CONTINUATION_CHARACTERS = 4000
PARAMETERS_CHARACTERS = range(4, 60)


def quotation(rng: np.random.Generator, half: int) -> Story:
    """Cues that stand in the text once, and the words behind them."""

    def ask(told: list[str]) -> list[Asked]:
        text = "".join(told)
        questions = []
        for sentence in in_random_order(rng, told):
            words = sentence.split()
            cue = " ".join(words[:CUE_WORDS])
            quoted = " ".join(words[CUE_WORDS : CUE_WORDS + QUOTED_WORDS])
            if len(words) >= CUE_WORDS + QUOTED_WORDS and text.count(cue) == 1:
                questions.append(Asked(f'How does this go on: "{cue} …"?', cue, f" {quoted}"))
        return questions[:QUESTIONS]

    return Story(sentences(document(rng, half)), (), ask)


def continuation(rng: np.random.Generator, half: int) -> Story:
    """The sentences behind the last one that was told whole."""
    source = list(islice(sentences(document(rng, half)), 4000))

    def ask(told: list[str]) -> list[Asked]:
        rest = source[len(told) + 1 :]
        text = "".join(rest[1:])[:CONTINUATION_CHARACTERS]
        return [Asked("", rest[0], text)]

    return Story(iter(source), (), ask)


def code(rng: np.random.Generator, half: int) -> Story:
    """Functions of the standard library, asked by name."""
    source: dict[str, Function] = {}

    def pieces() -> Iterator[str]:
        for function in functions(rng, half):
            piece = f"\n\n{function.source}"
            source[piece] = function
            yield piece

    def ask(told: list[str]) -> list[Asked]:
        questions = []
        for piece in in_random_order(rng, told):
            name, parameters, text = source[piece]
            head = f"def {name}({parameters})"
            if len(parameters) in PARAMETERS_CHARACTERS and head in text:
                question = f"What are the parameters of the function {name}?"
                questions.append(Asked(question, f"def {name}(", f"{parameters})"))
        return questions[:QUESTIONS]

    return Story(pieces(), (), ask)


__all__ = ["code", "continuation", "quotation"]

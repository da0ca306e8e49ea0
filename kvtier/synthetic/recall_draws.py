"""The random draws of a session of the recall language: names, codes, and which turns invent.

Words are token ids; everything random comes from the generator that is passed in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def invented_pairs(rng: np.random.Generator, num_turns: int, share: float) -> list[tuple[int, int]]:
    """(inventing turn, turn that asks again) pairs; the two are never the same turn."""
    count = min(int(num_turns * share / 2 + rng.random()), num_turns // 2) if share > 0 else 0
    chosen = rng.permutation(num_turns)[: 2 * count].reshape(count, 2)
    return [(int(pair.min()), int(pair.max())) for pair in chosen]


def names(
    rng: np.random.Generator, count: int, adjectives: range, nouns: range, *, shared_words: bool
) -> list[tuple[int, int]]:
    """`count` different (adjective, noun) pairs; with `shared_words` of few words each."""
    if not shared_words:
        chosen = rng.permutation(len(adjectives) * len(nouns))[:count]
        return [_pair(int(index), adjectives, nouns) for index in chosen]
    side = min(int(np.ceil(np.sqrt(1.5 * count))), len(adjectives), len(nouns))
    rows = rng.permutation(len(adjectives))[:side]
    columns = rng.permutation(len(nouns))[:side]
    cells = rng.permutation(side * side)[:count]
    return [
        (adjectives[int(rows[cell // side])], nouns[int(columns[cell % side])]) for cell in cells
    ]


def _pair(index: int, adjectives: range, nouns: range) -> tuple[int, int]:
    row, column = divmod(index, len(nouns))
    return adjectives[row], nouns[column]


def codes(
    rng: np.random.Generator,
    nouns: Sequence[int],
    vocabulary: range,
    num_codes: int,
    *,
    few_codes: bool,
) -> list[tuple[int, ...]]:
    """Return for each noun `num_codes` codes in which no pair of neighbouring words (the noun and
    its first code included) comes twice.

    A pair then tells where in which fact the reader is, so a model that matches two tokens can be
    right every time, and a wrong answer is the cache's fault.
    """
    pool = list(vocabulary)
    if few_codes:
        # Three times as many pairs as are needed, so that the search below always ends soon.
        size = max(12, int(np.ceil(np.sqrt(3 * num_codes * len(nouns)))))
        pool = rng.permutation(pool)[:size].tolist()
    used: set[tuple[int, int]] = set()
    return [_code_row(rng, noun, pool, num_codes, used) for noun in nouns]


def _code_row(
    rng: np.random.Generator,
    noun: int,
    pool: Sequence[int],
    num_codes: int,
    used: set[tuple[int, int]],
) -> tuple[int, ...]:
    row: list[int] = []
    before = noun
    while len(row) < num_codes:
        code = pool[int(rng.integers(len(pool)))]
        if (before, code) not in used:
            used.add((before, code))
            row.append(code)
            before = code
    return tuple(row)


__all__ = ["codes", "invented_pairs", "names"]

"""Tasks whose facts are hidden in prose; every answer is known, because the facts are made up.

    key-value   The code of amber fox is 4821 7713.             asked in the same words
    values      The codes of amber fox are 4821, 1902 and 7713. several values behind one key
    two-hop     Misty owl has the same code as amber fox.       one fact leads to another
    variables   The number 4821 goes to owl. … From owl it goes to fox.   all names, in order
    qa          In 1987 Anna Weber moved to Oslo and became …   asked in other words
    summary     Anna Weber arrived in Oslo. … in Lima. …        everything of one kind, in order

key-value, values and variables are retrieval and tracing as RULER asks for them (arXiv 2404.06654);
key-value, two-hop, qa and summary are the kinds of ContextKeeper's profiling set.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from kvtier.heads.samples.story import QUESTIONS, Asked, Story
from kvtier.synthetic.prose import document, sentences
from kvtier.synthetic.words import ADJECTIVES, NOUNS

TRAVELLERS, STOPS = 8, 4
CHAINS, CHAIN_LENGTH = 6, 3
VALUES = 3

FIRST_NAMES = (
    "Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo",
    "Irene", "Jonas", "Karin", "Leo", "Marta", "Nils", "Olga", "Peter",
)  # fmt: skip
_SURNAMES = (
    "Weber", "Silva", "Novak", "Larsen", "Costa", "Moreau", "Keller", "Rossi",
    "Jansen", "Kowalski", "Fischer", "Lindgren", "Dubois", "Santos", "Varga", "Berg",
)  # fmt: skip
CITIES = (
    "Athens", "Berlin", "Boston", "Cairo", "Dublin", "Geneva", "Hanoi", "Havana",
    "Helsinki", "Istanbul", "Jakarta", "Kyoto", "Lagos", "Lima", "Lisbon", "London",
    "Madrid", "Manila", "Milan", "Montreal", "Moscow", "Nairobi", "Naples", "Oslo",
    "Paris", "Prague", "Quito", "Rome", "Seoul", "Sydney", "Tunis", "Vienna",
)  # fmt: skip
TRADES = (
    "baker", "banker", "barber", "cook", "doctor", "farmer", "gardener", "judge",
    "lawyer", "nurse", "painter", "pilot", "potter", "sailor", "tailor", "teacher",
)  # fmt: skip


def key_value(rng: np.random.Generator, half: int) -> Story:
    """`The code of NAME is C`, asked in the same words, among twice as many names."""
    names, codes = _names(rng, 2 * QUESTIONS), _codes(rng, 2 * QUESTIONS)
    facts = [_code_fact(name, code) for name, code in zip(names, codes, strict=True)]
    asked = [_ask_code(name, code) for name, code in zip(names[:QUESTIONS], codes, strict=False)]
    return Story(_prose(rng, half), facts, lambda _: asked)


def values(rng: np.random.Generator, half: int) -> Story:
    """`The codes of NAME are A, B and C`."""
    names = _names(rng, QUESTIONS)
    lists = [rng.integers(1000, 10000, VALUES).tolist() for _ in names]
    said = [f" {', '.join(map(str, codes[:-1]))} and {codes[-1]}" for codes in lists]
    facts = [f" The codes of {name} are{codes}." for name, codes in zip(names, said, strict=True)]
    asked = [
        Asked(f"What are the codes of {name}?", f"The codes of {name} are", f"{codes}.")
        for name, codes in zip(names, said, strict=True)
    ]
    return Story(_prose(rng, half), facts, lambda _: asked)


def two_hop(rng: np.random.Generator, half: int) -> Story:
    """`NAME has the same code as OTHER` for half of the names, which are asked."""
    names, codes = _names(rng, 2 * QUESTIONS), _codes(rng, QUESTIONS)
    others, asked = names[:QUESTIONS], names[QUESTIONS:]
    facts = [_code_fact(name, code) for name, code in zip(others, codes, strict=True)]
    facts += [f" {a} has the same code as {b}." for a, b in zip(asked, others, strict=True)]
    questions = [_ask_code(name, code) for name, code in zip(asked, codes, strict=True)]
    return Story(_prose(rng, half), facts, lambda _: questions)


def variables(rng: np.random.Generator, half: int) -> Story:
    """Numbers that are handed on; the question wants every name that one reaches, in order."""
    drawn = rng.permutation(len(NOUNS))[: CHAINS * CHAIN_LENGTH].tolist()
    numbers = (1000 + rng.permutation(9000)[:CHAINS]).tolist()
    chains = [
        [NOUNS[i] for i in drawn[start : start + CHAIN_LENGTH]]
        for start in range(0, len(drawn), CHAIN_LENGTH)
    ]
    facts = [f" The number {n} goes to {c[0]}." for c, n in zip(chains, numbers, strict=True)]
    for link in range(1, CHAIN_LENGTH):
        facts += [f" From {chain[link - 1]} it goes to {chain[link]}." for chain in chains]
    asked = [
        Asked(
            f"Where does the number {number} go, and from there?",
            f"The number {number} goes to",
            "".join([f" {chain[0]}.", *(f" From {a} it goes to {b}." for a, b in pairwise(chain))]),
        )
        for chain, number in zip(chains, numbers, strict=True)
    ]
    return Story(_prose(rng, half), facts, lambda _: asked)


def qa(rng: np.random.Generator, half: int) -> Story:
    """Short lives, asked in words that do not stand in the text."""
    people = _people(rng, QUESTIONS)
    trades, cities = rng.integers(len(TRADES), size=QUESTIONS), rng.integers(32, size=QUESTIONS)
    lives = [(TRADES[t], CITIES[c]) for t, c in zip(trades, cities, strict=True)]
    facts = [
        f" In {rng.integers(1950, 2020)} {name} moved to {city} and became a {trade}."
        for name, (trade, city) in zip(people, lives, strict=True)
    ]
    asked = [
        Asked(
            f"What does {name} do for a living, and where?",
            f"{name} works as a",
            f" {trade} in {city}.",
        )
        for name, (trade, city) in zip(people, lives, strict=True)
    ]
    return Story(_prose(rng, half), facts, lambda _: asked)


def summary(rng: np.random.Generator, half: int) -> Story:
    """Journeys told stop by stop among others; the question wants all stops of one, in order."""
    people = _people(rng, TRAVELLERS)
    stops = [
        (name, CITIES[int(city)])
        for name in people
        for city in rng.permutation(len(CITIES))[:STOPS]
    ]
    city_of = {f" {name} arrived in {city}.": (name, city) for name, city in stops}

    def ask(told: list[str]) -> list[Asked]:
        in_order = [city_of[piece] for piece in told if piece in city_of]
        return [
            Asked(
                f"List the cities of {name}'s journey in the order of arrival.",
                f"{name} arrived in",
                f" {', '.join(city for who, city in in_order if who == name)}.",
            )
            for name in people
        ]

    return Story(_prose(rng, half), list(city_of), ask)


def _prose(rng: np.random.Generator, half: int) -> Iterator[str]:
    return sentences(document(rng, half))


def _names(rng: np.random.Generator, count: int) -> list[str]:
    drawn = rng.permutation(len(ADJECTIVES) * len(NOUNS))[:count]
    return [f"{ADJECTIVES[i // len(NOUNS)]} {NOUNS[i % len(NOUNS)]}" for i in drawn]


def _codes(rng: np.random.Generator, count: int) -> list[str]:
    return [f" {a} {b}" for a, b in rng.integers(1000, 10000, (count, 2))]


def _code_fact(name: str, code: str) -> str:
    return f" The code of {name} is{code}."


def _ask_code(name: str, code: str) -> Asked:
    return Asked(f"What is the code of {name}?", f"The code of {name} is", code)


def _people(rng: np.random.Generator, count: int) -> list[str]:
    drawn = rng.permutation(len(FIRST_NAMES) * len(_SURNAMES))[:count]
    width = len(_SURNAMES)
    return [f"{FIRST_NAMES[i // width]} {_SURNAMES[i % width]}" for i in drawn]


__all__ = ["key_value", "qa", "summary", "two_hop", "values", "variables"]

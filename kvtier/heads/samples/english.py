"""Calibration samples in English, for any tokenizer: facts inside filler, questions behind.

    key-value   The code of amber fox is 4821 7713.              the words of the question
    qa          In 1987 Anna Weber moved to Oslo to be a potter. other words than the question's
    two-hop     Misty owl has the same code as amber fox.        one fact leads to another
    summary     Anna Weber arrived in Oslo. … in Lima. …         everything of one kind, in order

The four kinds are those of ContextKeeper's profiling set (key-value retrieval, QA, multi-hop QA,
summarisation), made up, so that every answer is known exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.errors import SizeError
from kvtier.heads.samples.questions import CalibrationSample, Question
from kvtier.synthetic.words import ADJECTIVES, NOUNS

QUESTIONS = 16
TRAVELLERS = 8
STOPS = 4

Encode = Callable[[str], list[int]]
SampleMaker = Callable[[np.random.Generator, int, str], CalibrationSample]
"""(random numbers, context tokens, task) -> sample."""

_FILLER = (
    "The market opened late because of the rain.", "Nobody expected the bridge to hold so long.",
    "A train passed, and the windows shook for a while.", "They counted the chairs twice.",
    "The old map showed a road that no longer exists.", "Someone had left the lights on again.",
    "In spring the valley fills with the sound of water.", "The letter arrived without a stamp.",
)  # fmt: skip
_FIRST_NAMES = (
    "Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo",
    "Irene", "Jonas", "Karin", "Leo", "Marta", "Nils", "Olga", "Peter",
)  # fmt: skip
_SURNAMES = (
    "Weber", "Silva", "Novak", "Larsen", "Costa", "Moreau", "Keller", "Rossi",
    "Jansen", "Kowalski", "Fischer", "Lindgren", "Dubois", "Santos", "Varga", "Berg",
)  # fmt: skip
_CITIES = (
    "Athens", "Berlin", "Boston", "Cairo", "Dublin", "Geneva", "Hanoi", "Havana",
    "Helsinki", "Istanbul", "Jakarta", "Kyoto", "Lagos", "Lima", "Lisbon", "London",
    "Madrid", "Manila", "Milan", "Montreal", "Moscow", "Nairobi", "Naples", "Oslo",
    "Paris", "Prague", "Quito", "Rome", "Seoul", "Sydney", "Tunis", "Vienna",
)  # fmt: skip
_TRADES = (
    "baker", "banker", "barber", "cook", "doctor", "farmer", "gardener", "judge",
    "lawyer", "nurse", "painter", "pilot", "potter", "sailor", "tailor", "teacher",
)  # fmt: skip


@dataclass(frozen=True)
class Story:
    """facts: sentences, to be told in any order
    ask:   (question, answer) pairs, given the order in which the facts were told
    """

    facts: list[str]
    ask: Callable[[list[int]], list[tuple[str, str]]]


def key_value(rng: np.random.Generator) -> Story:
    """`The code of NAME is C`, asked in the same words."""
    names, codes = _coded_names(rng)
    facts = [_code_fact(name, code) for name, code in zip(names, codes, strict=True)]
    return Story(facts, lambda _: _ask_codes(names[:QUESTIONS], codes))


def two_hop(rng: np.random.Generator) -> Story:
    """`NAME has the same code as OTHER` for half of the names, which are asked."""
    names, codes = _coded_names(rng)
    others, asked = names[:QUESTIONS], names[QUESTIONS:]
    facts = [_code_fact(name, code) for name, code in zip(others, codes, strict=False)]
    facts += [f" {a} has the same code as {b}." for a, b in zip(asked, others, strict=True)]
    return Story(facts, lambda _: _ask_codes(asked, codes))


def qa(rng: np.random.Generator) -> Story:
    """Short lives, asked in words that do not stand in the text."""
    people = _people(rng, QUESTIONS)
    lives = [
        (_TRADES[int(rng.integers(len(_TRADES)))], _CITIES[int(rng.integers(len(_CITIES)))])
        for _ in people
    ]
    facts = [
        f" In {rng.integers(1950, 2020)} {name} moved to {city} and became a {trade}."
        for name, (trade, city) in zip(people, lives, strict=True)
    ]
    question = "\nQuestion: What does {0} do for a living, and where?\nAnswer: {0} works as a"
    pairs = [
        (question.format(name), f" {trade} in {city}.")
        for name, (trade, city) in zip(people, lives, strict=True)
    ]
    return Story(facts, lambda _: pairs)


def summary(rng: np.random.Generator) -> Story:
    """Journeys told stop by stop among others; the question wants all stops of one, in order."""
    people = _people(rng, TRAVELLERS)
    stops = [
        (name, _CITIES[int(city)])
        for name in people
        for city in rng.permutation(len(_CITIES))[:STOPS]
    ]
    facts = [f" {name} arrived in {city}." for name, city in stops]
    question = (
        "\nQuestion: Summarise the journey of {0}: list the cities in the order of arrival."
        "\nAnswer: {0} arrived in"
    )

    def ask(order: list[int]) -> list[tuple[str, str]]:
        journeys = {name: [stops[i][1] for i in order if stops[i][0] == name] for name in people}
        return [
            (question.format(name), f" {', '.join(cities)}.") for name, cities in journeys.items()
        ]

    return Story(facts, ask)


STORIES: dict[str, Callable[[np.random.Generator], Story]] = {
    "key-value": key_value,
    "qa": qa,
    "two-hop": two_hop,
    "summary": summary,
}
TEXT_TASKS = tuple(STORIES)


def text_maker(encode: Encode, first: Sequence[int]) -> SampleMaker:
    """Samples in English for any tokenizer; `first` starts every context (often BOS)."""

    def make(rng: np.random.Generator, context_tokens: int, task: str) -> CalibrationSample:
        story = STORIES[task](rng)
        facts = [encode(fact) for fact in story.facts]
        context, order = _weave(rng, facts, context_tokens - len(first), encode)
        questions = tuple(
            Question(tuple(encode(question)), tuple(encode(answer)))
            for question, answer in story.ask(order)
        )
        return CalibrationSample((*first, *context), questions, task)

    return make


def _coded_names(rng: np.random.Generator) -> tuple[list[str], list[str]]:
    chosen = rng.permutation(len(ADJECTIVES) * len(NOUNS))[: 2 * QUESTIONS]
    names = [f"{ADJECTIVES[i // len(NOUNS)]} {NOUNS[i % len(NOUNS)]}" for i in chosen]
    return names, [f" {a} {b}" for a, b in rng.integers(1000, 10000, (len(names), 2))]


def _code_fact(name: str, code: str) -> str:
    return f" The code of {name} is{code}."


def _ask_codes(names: Sequence[str], codes: Sequence[str]) -> list[tuple[str, str]]:
    question = "\nQuestion: What is the code of {0}?\nAnswer: The code of {0} is"
    return [(question.format(name), code) for name, code in zip(names, codes, strict=False)]


def _people(rng: np.random.Generator, count: int) -> list[str]:
    chosen = rng.permutation(len(_FIRST_NAMES) * len(_SURNAMES))[:count]
    width = len(_SURNAMES)
    return [f"{_FIRST_NAMES[i // width]} {_SURNAMES[i % width]}" for i in chosen]


def _weave(
    rng: np.random.Generator, facts: list[list[int]], num_tokens: int, encode: Encode
) -> tuple[list[int], list[int]]:
    """Facts in random order between filler sentences: exactly `num_tokens` ids, and the order.

    Raises SizeError when the facts alone are longer.
    """
    room = num_tokens - sum(map(len, facts))
    if room < 0:
        raise SizeError("--len", f"at least {num_tokens - room} tokens", num_tokens)
    filler = [encode(" " + sentence) for sentence in _FILLER]
    pieces = list(facts)
    while room > 0:
        piece = filler[int(rng.integers(len(filler)))][:room]
        pieces.append(piece)
        room -= len(piece)
    order = rng.permutation(len(pieces)).tolist()
    return [token for i in order for token in pieces[i]], [i for i in order if i < len(facts)]

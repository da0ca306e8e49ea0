"""The tasks in real text: what each tells, and what is asked about it.

    quotation     a passage of the middle is begun, and its next words are wanted
    continuation  nothing is asked: what the text itself says next
    code          the parameters of a function whose source stands in the middle
    many-shot     Oslo => blick … baker => fendle …    the label of a word like those labelled
    common        … one vote for Oslo … for Lima …     what most votes go to (RULER's common words)
    key-value     The code of amber fox is 4821 7713.             asked in the same words
    values        The codes of amber fox are 4821, 1902 and 7713. several values behind one key
    two-hop       Misty owl has the same code as amber fox.       one fact leads to another
    variables     The number 4821 goes to owl. … From owl it goes to fox.   all names, in order
    qa            In 1987 Anna Weber moved to Oslo and became …   asked in other words
    summary       Anna Weber arrived in Oslo. … in Lima. …        everything of one kind, in order

key-value, values and variables are retrieval and tracing as RULER asks for them (arXiv 2404.06654);
key-value, two-hop, qa and summary are the kinds of ContextKeeper's profiling set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from kvtier.synthetic.standard_library import Function, document, functions, sentences
from kvtier.synthetic.words import ADJECTIVES, NOUNS

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

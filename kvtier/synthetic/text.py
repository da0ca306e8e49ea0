"""Sessions in English for any model: codes hidden in prose, and questions about them.

    Remember the codes … prose. One vault code is amber-fox-48213. prose … prose.
    Which vault code begins with amber-fox? …  → The vault code is amber-fox-│48213.

The answer is begun for the model, up to the bar, so that what is left is a number that no model can
guess. It is right when its first number is that one. The number stands right behind its name in the
fact as in the answer: copying what followed the name is enough.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.errors import SizeError, UsageError
from kvtier.synthetic.frame import frame_of
from kvtier.synthetic.script import Lengths, ScriptedSession
from kvtier.synthetic.standard_library import paragraphs, sentences_of
from kvtier.synthetic.tokenizer import Tokenizer
from kvtier.synthetic.words import ADJECTIVES, NOUNS

MAX_SESSION_FACTS = 64
# At most this share of a context is facts.
FACTS_SHARE = 0.25
# Tokens that an answer may have behind the right number: an end of sentence, an end of turn.
SPARE_ANSWER_TOKENS = 3
_INSTRUCTION = "Remember the codes that are hidden in this text.\n\n"
_FACT = "One vault code is {name}-{number}."
_QUESTION = "Which vault code begins with {name}? Answer with the whole code."
_ANSWER_START = "The vault code is {name}-"
_NUMBERS = range(10_000, 100_000)
# Numbers take different numbers of tokens: enough of them to have seen the longest.
_SAMPLES = tuple(str(number) for number in _NUMBERS[::1407])
_NUMBER = re.compile(r"\d+(?:,\d{3})*")


@dataclass(frozen=True)
class Fact:
    """A code: a name and a number, both as they are written."""

    name: str
    number: str

    @property
    def sentence(self) -> str:
        return _FACT.format(name=self.name, number=self.number)


@dataclass(frozen=True)
class TextTurn:
    """A question about one fact. answer_ids: its number, as the begun answer goes on."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    fact: Fact

    def expected(self, answers_so_far: Sequence[Sequence[int]]) -> tuple[int, ...]:
        return self.answer_ids


class TextScript:
    """See the module docstring and `Script`. Immutable once made; raises UsageError for a tokenizer
    whose chat template cannot be used."""

    recall_means = "share of answers right"
    unscored = 0

    def __init__(self, tokenizer: Tokenizer) -> None:
        _check_numbers(tokenizer)
        self._tokenizer = tokenizer
        self._frame = frame_of(tokenizer)
        self._opening = self._encode_opening()
        self._longest_name = "".join(
            max((f"{before}{word}" for word in words), key=lambda text: len(tokenizer.encode(text)))
            for before, words in ((" ", ADJECTIVES), ("-", NOUNS))
        ).strip()
        self._fact_tokens = max(
            self._tokens_of(Fact(self._longest_name, number)) for number in _SAMPLES
        )
        self.stop_ids = self._frame.stop_ids
        self.closing_ids = tuple(tokenizer.encode(self._frame.closing))
        turns = [
            self._turn(Fact(self._longest_name, number), first=first)
            for number in _SAMPLES
            for first in (True, False)
        ]
        self.max_answer = max(len(turn.answer_ids) for turn in turns) + SPARE_ANSWER_TOKENS
        self.lengths = Lengths(
            prompt=max(len(turn.prompt_ids) for turn in turns),
            answer=self.max_answer + len(self.closing_ids),
        )
        self.warm_up_ids = tuple(tokenizer.encode(" ".join(ADJECTIVES + NOUNS)))

    def _encode_opening(self) -> tuple[int, ...]:
        tokenizer = self._tokenizer
        ids = tokenizer.encode(self._frame.opening + _INSTRUCTION)
        return tuple(ids) if tokenizer.has_chat_template else (*tokenizer.first_ids, *ids)

    def check_context(self, context_tokens: int) -> None:
        least = len(self._opening) + math.ceil(self._fact_tokens / FACTS_SHARE)
        if context_tokens < least:
            raise SizeError("--len", f"at least {least} tokens with this tokenizer", context_tokens)

    def session(
        self, rng: np.random.Generator, context_tokens: int, turns: int, questions: int
    ) -> ScriptedSession:
        self.check_context(context_tokens)
        room = context_tokens - len(self._opening)
        num_facts = min(MAX_SESSION_FACTS, int(FACTS_SHARE * room / self._fact_tokens))
        facts = _draw_facts(rng, num_facts)
        context = self._write(rng, facts, room)
        asked = _in_random_order(rng, facts)
        main, branches = [], []
        for turn in range(turns):
            main.append(self._turn(next(asked), first=turn == 0))
            others = (self._turn(next(asked), first=False) for _ in range(questions - 1))
            branches.append(tuple(others))
        return ScriptedSession((*self._opening, *context), tuple(main), tuple(branches))

    def _tokens_of(self, fact: Fact) -> int:
        """Tokens that a fact adds to a text, and room for tokens that join or split beside it."""
        return len(self._tokenizer.encode(f" {fact.sentence}")) + 2

    def _write(self, rng: np.random.Generator, facts: Sequence[Fact], room: int) -> list[int]:
        """Prose with the facts between its sentences, exactly `room` ids. Prose without facts fills
        the end, so that nothing else is cut there."""
        encode = self._tokenizer.encode
        left = room - sum(map(self._tokens_of, facts)) - len(encode("\n\n"))
        source = paragraphs(rng)
        told: list[list[str]] = []
        text = next(source)
        while (tokens := len(encode(text + "\n\n"))) <= left:
            told.append(sentences_of(text))
            text, left = next(source), left - tokens
        told.append([])  # facts alone, where no paragraph fits
        places = [(part, at) for part, lines in enumerate(told) for at in range(len(lines) + 1)]
        chosen = np.sort(rng.integers(len(places), size=len(facts))).tolist()
        # Facts are put in from the back, so that the places in front stay where they are.
        for fact, place in zip(reversed(facts), reversed(chosen), strict=True):
            part, at = places[place]
            told[part].insert(at, fact.sentence)
        context = [token for lines in told if lines for token in encode(" ".join(lines) + "\n\n")]
        assert len(context) <= room, "the facts are not cut off"
        while len(context) < room:
            context += encode(text + "\n\n")
            text = next(source)
        return context[:room]

    def _turn(self, fact: Fact, *, first: bool) -> TextTurn:
        frame, encode = self._frame, self._tokenizer.encode
        lead = frame.first if first else frame.following
        question = lead + _QUESTION.format(name=fact.name) + frame.reply
        prompt = question + _ANSWER_START.format(name=fact.name)
        prompt_ids, whole = encode(prompt), encode(prompt + fact.number)
        continues = whole[: len(prompt_ids)] == prompt_ids
        answer_ids = whole[len(prompt_ids) :] if continues else encode(fact.number)
        return TextTurn(tuple(prompt_ids), tuple(answer_ids), fact)

    def judge(self, right: Sequence[int], given: Sequence[int]) -> float:
        """1 when the first number of the answer is the right one, 0 otherwise."""
        wanted, said = (_first_number(self._tokenizer.decode(ids)) for ids in (right, given))
        return float(wanted is not None and wanted == said)


def _check_numbers(tokenizer: Tokenizer) -> None:
    """Raise UsageError for a tokenizer in which no number can be written."""
    number = _SAMPLES[-1]
    if _first_number(tokenizer.decode(tokenizer.encode(number))) != number:
        expected = "a model whose tokenizer writes numbers, for a workload of text"
        raise UsageError("--model-path", expected, tokenizer.model_path)


def _first_number(text: str) -> str | None:
    found = _NUMBER.search(text)
    return None if found is None else found[0].replace(",", "")


def _draw_facts(rng: np.random.Generator, count: int) -> list[Fact]:
    """Different numbers behind different names, whose words are shared as late as can be."""
    adjectives, nouns = rng.permutation(ADJECTIVES).tolist(), rng.permutation(NOUNS).tolist()
    numbers = rng.permutation(len(_NUMBERS))[:count].tolist()
    return [
        Fact(
            f"{adjectives[i % len(adjectives)]}-{nouns[(i + i // len(adjectives)) % len(nouns)]}",
            str(_NUMBERS[number]),
        )
        for i, number in enumerate(numbers)
    ]


def _in_random_order(rng: np.random.Generator, facts: Sequence[Fact]) -> Iterator[Fact]:
    """Every fact once before one comes again, without end."""
    while True:
        for index in rng.permutation(len(facts)).tolist():
            yield facts[index]

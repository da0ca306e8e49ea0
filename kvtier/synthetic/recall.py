"""The recall language: long sessions whose right answers are known exactly.

A session is a context of filler text with facts hidden in it, then turns that ask for some of
them.  No method that compresses the context can know which facts will be asked.

    <bos> river along … amber fox k07 k61 … k12 . … stone      context: facts inside Markov filler
    <user> paper still … amber fox <assistant>                 prompt, 17 tokens by default
    amber fox k07 k61 … k12 <eot>                              answer: name, 8 codes, end of turn

A name is an adjective and a noun; both are shared between facts, so both must be matched.  Some
turns ask for a name that is *not* in the context: the model then invents a code, and a later
turn asks again, so the right answer is what the model said before (`Turn.refers_to_turn`).

The module needs numpy and nothing else: training, head calibration and the benchmark use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np

from kvtier.synthetic import words as words

NUM_CODES = 8
FACT_TOKENS = 2 + NUM_CODES + 1
ANSWER_TOKENS = 2 + NUM_CODES + 1
PROMPT_TOKENS = 17
MAX_FACTS = 256


@dataclass(frozen=True)
class RecallLanguage:
    """Vocabulary and filler statistics; equal seeds give equal languages.

    Token ids are laid out in one run per class:

        | specials | "." | adjectives | nouns | codes | filler |   vocab_size = 384
    """

    seed: int = 20_26
    successors: int = 4

    @cached_property
    def vocab(self) -> tuple[str, ...]:
        """Word of every id."""
        return (
            *(*words.SPECIALS, words.FULL_STOP),
            *(*words.ADJECTIVES, *words.NOUNS, *words.CODES),
            *words.FILLER,
        )

    @cached_property
    def ids(self) -> dict[str, int]:
        """Id of every word."""
        return {word: index for index, word in enumerate(self.vocab)}

    @property
    def vocab_size(self) -> int:
        return len(self.vocab)

    def _range(self, group: Sequence[str]) -> range:
        first = self.ids[group[0]]
        return range(first, first + len(group))

    @cached_property
    def adjectives(self) -> range:
        return self._range(words.ADJECTIVES)

    @cached_property
    def nouns(self) -> range:
        return self._range(words.NOUNS)

    @cached_property
    def codes(self) -> range:
        return self._range(words.CODES)

    @cached_property
    def filler(self) -> range:
        return self._range(words.FILLER)

    @cached_property
    def bos(self) -> int:
        return self.ids["<bos>"]

    @cached_property
    def eot(self) -> int:
        return self.ids["<eot>"]

    @cached_property
    def pad(self) -> int:
        return self.ids["<pad>"]

    @cached_property
    def user(self) -> int:
        return self.ids["<user>"]

    @cached_property
    def assistant(self) -> int:
        return self.ids["<assistant>"]

    @cached_property
    def full_stop(self) -> int:
        return self.ids[words.FULL_STOP]

    @cached_property
    def transitions(self) -> np.ndarray:
        """Ids that may follow each filler word, equally likely: `[num_filler, successors]`."""
        rng = np.random.default_rng(self.seed)
        rows = [rng.permutation(len(self.filler))[: self.successors] for _ in self.filler]
        return np.stack(rows) + self.filler.start

    @cached_property
    def _walk_table(self) -> list[int]:
        return (self.transitions - self.filler.start).ravel().tolist()

    def filler_walk(self, rng: np.random.Generator, num_tokens: int) -> np.ndarray:
        """A random walk over the filler words: int64 `[num_tokens]`."""
        if num_tokens <= 0:
            return np.zeros(0, dtype=np.int64)
        table, width = self._walk_table, self.successors
        start = int(rng.integers(len(self.filler)))
        choices = rng.integers(width, size=num_tokens - 1).tolist()
        steps = accumulate(choices, lambda at, choice: table[at * width + choice], initial=start)
        return np.fromiter(steps, dtype=np.int64, count=num_tokens) + self.filler.start

    def decode(self, token_ids: Iterable[int]) -> str:
        """Words joined by single spaces, special tokens included."""
        return " ".join(self.vocab[token] for token in token_ids)

    def encode(self, text: str) -> list[int]:
        """Inverse of `decode`; a word outside the vocabulary becomes `<unk>`."""
        unknown = self.ids["<unk>"]
        return [self.ids.get(word, unknown) for word in text.split()]


DEFAULT_LANGUAGE = RecallLanguage()


@dataclass(frozen=True)
class Fact:
    """A name and its codes; `position` is the index of the name's first token in the context."""

    name: tuple[int, int]
    codes: tuple[int, ...]
    position: int

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """The ids that the model should say, without the closing `<eot>`."""
        return (*self.name, *self.codes)


@dataclass(frozen=True)
class Turn:
    """One question.

    prompt_ids:      `<user> filler… adjective noun <assistant>`
    answer_ids:      name and codes (no `<eot>`), or None where the model is free to invent them
    refers_to_turn:  index of the turn whose *given* answer is the right one here, or None
    fact_position:   where in the context the fact stands, or None
    """

    prompt_ids: tuple[int, ...]
    name: tuple[int, int]
    answer_ids: tuple[int, ...] | None = None
    refers_to_turn: int | None = None
    fact_position: int | None = None

    @property
    def invents(self) -> bool:
        """True where there is no right answer yet."""
        return self.answer_ids is None and self.refers_to_turn is None

    def expected(self, answers_so_far: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        """The right answer given what the model said in turns 0, 1, …; None where it invents."""
        if self.refers_to_turn is not None:
            return tuple(answers_so_far[self.refers_to_turn])
        return self.answer_ids


@dataclass(frozen=True)
class Session:
    """A context `[context_tokens]` (starting with `<bos>`) and the turns that follow it."""

    context_ids: np.ndarray
    facts: tuple[Fact, ...]
    turns: tuple[Turn, ...]
    language: RecallLanguage = field(default=DEFAULT_LANGUAGE, repr=False)

    def answered_ids(self, rng: np.random.Generator) -> tuple[list[int], list[int]]:
        """All turns with answers filled in, for teacher forcing.

        Invented answers get random codes.  Returns token ids and, per token, a mark:
        0 prompt, 1 answer token that can be known, 2 code that is invented here.
        """
        ids: list[int] = []
        marks: list[int] = []
        answers: list[tuple[int, ...]] = []
        for turn in self.turns:
            answer = turn.expected(answers)
            invented = answer is None
            if answer is None:
                codes = rng.integers(self.language.codes.start, self.language.codes.stop, NUM_CODES)
                answer = (*turn.name, *(int(code) for code in codes))
            answers.append(answer)
            ids += [*turn.prompt_ids, *answer, self.language.eot]
            marks += [0] * len(turn.prompt_ids) + [1, 1] + [2 if invented else 1] * NUM_CODES + [1]
        return ids, marks


@dataclass(frozen=True)
class Score:
    """`codes` is the share of code tokens right at their place; `strict` needs all right."""

    codes: float
    strict: bool


def score_answer(expected: Sequence[int], got: Sequence[int]) -> Score:
    """Compare a generated answer with the right one; both are `name codes…`, `<eot>` optional.

    Place by place, so a shifted answer is wrong; extra tokens before the end of turn cost `strict`.
    """
    expected, got = _before_eot(expected), _before_eot(got)
    wanted = expected[2:]
    hits = sum(want == have for want, have in zip(wanted, got[2:], strict=False))
    share = hits / len(wanted) if wanted else float(expected == got)
    return Score(codes=share, strict=expected == got)


def _before_eot(token_ids: Sequence[int]) -> list[int]:
    listed = [int(token) for token in token_ids]
    eot = DEFAULT_LANGUAGE.eot
    return listed[: listed.index(eot)] if eot in listed else listed


def make_session(
    rng: np.random.Generator,
    context_tokens: int,
    num_turns: int,
    num_facts: int | None = None,
    *,
    invented_share: float = 0.25,
    prompt_tokens: int = PROMPT_TOKENS,
    shared_words: bool = False,
    few_codes: bool = False,
    language: RecallLanguage = DEFAULT_LANGUAGE,
) -> Session:
    """A random session; everything random comes from `rng`.

    context_tokens:  exact length of the context, `<bos>` included
    num_facts:       default 8 … 64 at random, as many as fit
    invented_share:  share of turns that invent an answer or ask for an invented one again
    prompt_tokens:   length of every prompt; at least 4
    shared_words:    draw names from few adjectives and nouns, so that near misses are common
    few_codes:       draw codes from a part of the code words, for the same reason

    Raises ValueError where facts or prompts do not fit.
    """
    room = min((context_tokens - 1) // FACT_TOKENS, MAX_FACTS)
    if num_facts is None:
        num_facts = min(int(rng.integers(8, 65)), max(1, room // 2))
    if not 1 <= num_facts <= room:
        raise ValueError(f"num_facts must be 1 … {room} for {context_tokens=}, got {num_facts}")
    if prompt_tokens < 4:
        raise ValueError(f"prompt_tokens must be at least 4, got {prompt_tokens}")
    invented = _invented_pairs(rng, num_turns, invented_share)
    words_of = (language.adjectives, language.nouns)
    names = _names(rng, num_facts + len(invented), *words_of, shared_words=shared_words)
    nouns = [noun for _, noun in names[:num_facts]]
    codes = _codes(rng, nouns, language.codes, NUM_CODES, few_codes=few_codes)
    context, facts = _write_context(rng, context_tokens, names[:num_facts], codes, language)
    turns = _ask(rng, num_turns, facts, names[num_facts:], invented, prompt_tokens, language)
    return Session(context, facts, turns, language)


def _write_context(
    rng: np.random.Generator,
    context_tokens: int,
    names: Sequence[tuple[int, int]],
    codes: Sequence[tuple[int, ...]],
    language: RecallLanguage,
) -> tuple[np.ndarray, tuple[Fact, ...]]:
    """Facts at uniformly random places of one filler walk, never inside each other."""
    num_filler = context_tokens - 1 - FACT_TOKENS * len(names)
    places = np.sort(rng.integers(0, num_filler + 1, size=len(names)))
    walk = language.filler_walk(rng, num_filler)
    pieces = [np.array([language.bos])]
    facts = []
    before = 0
    for order, (place, name, row) in enumerate(zip(places.tolist(), names, codes, strict=True)):
        pieces += [walk[before:place], np.array([*name, *row, language.full_stop])]
        facts.append(Fact(name, row, position=1 + place + FACT_TOKENS * order))
        before = place
    pieces.append(walk[before:])
    return np.concatenate(pieces), tuple(facts)


def _ask(
    rng: np.random.Generator,
    num_turns: int,
    facts: Sequence[Fact],
    new_names: Sequence[tuple[int, int]],
    invented: Sequence[tuple[int, int]],
    prompt_tokens: int,
    language: RecallLanguage,
) -> tuple[Turn, ...]:
    """Turns in order; a fact is asked again only when every fact has been asked."""
    first_of = {first: name for (first, _), name in zip(invented, new_names, strict=True)}
    again_of = {again: first for first, again in invented}
    order: list[int] = []
    turns = []
    for index in range(num_turns):
        if index in first_of or index in again_of:
            name = first_of[again_of.get(index, index)]
            prompt = _prompt(rng, name, prompt_tokens, language)
            turns.append(Turn(prompt, name, refers_to_turn=again_of.get(index)))
            continue
        order = order or rng.permutation(len(facts)).tolist()
        turns.append(question_about(rng, facts[order.pop()], prompt_tokens, language))
    return tuple(turns)


def question_about(
    rng: np.random.Generator,
    fact: Fact,
    prompt_tokens: int = PROMPT_TOKENS,
    language: RecallLanguage = DEFAULT_LANGUAGE,
) -> Turn:
    """A turn that asks for a fact of the context, filler in front of its name."""
    prompt = _prompt(rng, fact.name, prompt_tokens, language)
    return Turn(prompt, fact.name, fact.answer_ids, fact_position=fact.position)


def _prompt(
    rng: np.random.Generator, name: tuple[int, int], prompt_tokens: int, language: RecallLanguage
) -> tuple[int, ...]:
    filler = language.filler_walk(rng, prompt_tokens - 4).tolist()
    return (language.user, *filler, *name, language.assistant)


def _invented_pairs(
    rng: np.random.Generator, num_turns: int, share: float
) -> list[tuple[int, int]]:
    """(inventing turn, turn that asks again) pairs; the two are never the same turn."""
    count = min(int(num_turns * share / 2 + rng.random()), num_turns // 2) if share > 0 else 0
    chosen = rng.permutation(num_turns)[: 2 * count].reshape(count, 2)
    return [(int(pair.min()), int(pair.max())) for pair in chosen]


def _names(
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


def _codes(
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

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
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from kvtier.synthetic import words as words

NUM_CODES = 8
FACT_TOKENS = 2 + NUM_CODES + 1
ANSWER_TOKENS = 2 + NUM_CODES + 1
PROMPT_TOKENS = 17
MAX_FACTS = 256


SEED, SUCCESSORS = 20_26, 4


class RecallLanguage:
    """Vocabulary and filler statistics. Token ids are laid out in one run per class:

        | specials | "." | adjectives | nouns | codes | filler |   vocab_size = 384

    vocab, ids:  the word of every id, and the id of every word
    transitions: ids that may follow each filler word, equally likely: `[num_filler, successors]`
    """

    def __init__(self) -> None:
        runs = (words.ADJECTIVES, words.NOUNS, words.CODES, words.FILLER)
        specials = (*words.SPECIALS, words.FULL_STOP)
        self.vocab = (*specials, *chain(*runs))
        self.vocab_size = len(self.vocab)
        self.ids = {word: index for index, word in enumerate(self.vocab)}
        self.adjectives, self.nouns, self.codes, self.filler = (
            range(self.ids[run[0]], self.ids[run[0]] + len(run)) for run in runs
        )
        self.pad, self.bos, self.eot, self.user, self.assistant, *_ = range(len(specials))
        self.full_stop = self.ids[words.FULL_STOP]
        rng = np.random.default_rng(SEED)
        rows = [rng.permutation(len(self.filler))[:SUCCESSORS] for _ in self.filler]
        self.transitions = np.stack(rows) + self.filler.start
        self._walk_table: list[int] = np.stack(rows).ravel().tolist()

    def filler_walk(self, rng: np.random.Generator, num_tokens: int) -> np.ndarray:
        """A random walk over the filler words: int64 `[num_tokens]`."""
        if num_tokens <= 0:
            return np.zeros(0, dtype=np.int64)
        table, width = self._walk_table, SUCCESSORS
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
                codes = DEFAULT_LANGUAGE.codes
                drawn = rng.integers(codes.start, codes.stop, NUM_CODES)
                answer = (*turn.name, *(int(code) for code in drawn))
            answers.append(answer)
            ids += [*turn.prompt_ids, *answer, DEFAULT_LANGUAGE.eot]
            marks += [0] * len(turn.prompt_ids) + [1, 1] + [2 if invented else 1] * NUM_CODES + [1]
        return ids, marks


def score_answer(expected: Sequence[int], got: Sequence[int]) -> float:
    """Return the share of code tokens that are right at their place: a shifted answer is wrong.
    expected, got: `name codes…`, `<eot>` optional."""
    expected, got = _before_eot(expected), _before_eot(got)
    wanted = expected[2:]
    hits = sum(want == have for want, have in zip(wanted, got[2:], strict=False))
    return hits / len(wanted) if wanted else float(expected == got)


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
    names = _names(rng, num_facts + len(invented), shared_words=shared_words)
    nouns = [noun for _, noun in names[:num_facts]]
    codes = _codes(rng, nouns, few_codes=few_codes)
    context, facts = _write_context(rng, context_tokens, names[:num_facts], codes)
    turns = _ask(rng, num_turns, facts, names[num_facts:], invented, prompt_tokens)
    return Session(context, facts, turns)


def _write_context(
    rng: np.random.Generator,
    context_tokens: int,
    names: Sequence[tuple[int, int]],
    codes: Sequence[tuple[int, ...]],
) -> tuple[np.ndarray, tuple[Fact, ...]]:
    """Facts at uniformly random places of one filler walk, never inside each other."""
    language = DEFAULT_LANGUAGE
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
) -> tuple[Turn, ...]:
    """Turns in order; a fact is asked again only when every fact has been asked."""
    first_of = {first: name for (first, _), name in zip(invented, new_names, strict=True)}
    again_of = {again: first for first, again in invented}
    order: list[int] = []
    turns = []
    for index in range(num_turns):
        if index in first_of or index in again_of:
            name = first_of[again_of.get(index, index)]
            prompt = _prompt(rng, name, prompt_tokens)
            turns.append(Turn(prompt, name, refers_to_turn=again_of.get(index)))
            continue
        order = order or rng.permutation(len(facts)).tolist()
        turns.append(question_about(rng, facts[order.pop()], prompt_tokens))
    return tuple(turns)


def question_about(
    rng: np.random.Generator, fact: Fact, prompt_tokens: int = PROMPT_TOKENS
) -> Turn:
    """A turn that asks for a fact of the context, filler in front of its name."""
    prompt = _prompt(rng, fact.name, prompt_tokens)
    return Turn(prompt, fact.name, fact.answer_ids, fact_position=fact.position)


def _prompt(rng: np.random.Generator, name: tuple[int, int], prompt_tokens: int) -> tuple[int, ...]:
    language = DEFAULT_LANGUAGE
    filler = language.filler_walk(rng, prompt_tokens - 4).tolist()
    return (language.user, *filler, *name, language.assistant)


def _invented_pairs(
    rng: np.random.Generator, num_turns: int, share: float
) -> list[tuple[int, int]]:
    """(inventing turn, turn that asks again) pairs; the two are never the same turn."""
    count = min(int(num_turns * share / 2 + rng.random()), num_turns // 2) if share > 0 else 0
    chosen = rng.permutation(num_turns)[: 2 * count].reshape(count, 2)
    return [(int(pair.min()), int(pair.max())) for pair in chosen]


def _names(rng: np.random.Generator, count: int, *, shared_words: bool) -> list[tuple[int, int]]:
    """`count` different (adjective, noun) pairs; with `shared_words` of few words each."""
    adjectives, nouns = DEFAULT_LANGUAGE.adjectives, DEFAULT_LANGUAGE.nouns
    if not shared_words:
        chosen = rng.permutation(len(adjectives) * len(nouns))[:count].tolist()
        return [(adjectives[i // len(nouns)], nouns[i % len(nouns)]) for i in chosen]
    side = min(int(np.ceil(np.sqrt(1.5 * count))), len(adjectives), len(nouns))
    rows = rng.permutation(len(adjectives))[:side].tolist()
    columns = rng.permutation(len(nouns))[:side].tolist()
    cells = rng.permutation(side * side)[:count].tolist()
    return [(adjectives[rows[cell // side]], nouns[columns[cell % side]]) for cell in cells]


def _codes(
    rng: np.random.Generator, nouns: Sequence[int], *, few_codes: bool
) -> list[tuple[int, ...]]:
    """Return for each noun NUM_CODES codes in which no pair of neighbouring words (the noun and
    its first code included) comes twice.

    A pair then tells where in which fact the reader is, so a model that matches two tokens can be
    right every time, and a wrong answer is the cache's fault.
    """
    pool = list(DEFAULT_LANGUAGE.codes)
    if few_codes:
        # Three times as many pairs as are needed, so that the search below always ends soon.
        size = max(12, int(np.ceil(np.sqrt(3 * NUM_CODES * len(nouns)))))
        pool = rng.permutation(pool)[:size].tolist()
    used: set[tuple[int, int]] = set()
    return [_code_row(rng, noun, pool, used) for noun in nouns]


def _code_row(
    rng: np.random.Generator, noun: int, pool: Sequence[int], used: set[tuple[int, int]]
) -> tuple[int, ...]:
    row: list[int] = []
    before = noun
    while len(row) < NUM_CODES:
        code = pool[int(rng.integers(len(pool)))]
        if (before, code) not in used:
            used.add((before, code))
            row.append(code)
            before = code
    return tuple(row)

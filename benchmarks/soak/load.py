"""The questions of the soak's clients: sessions of the recall language, their scopes, and what is
done with them next.

    short    never longer than what locality heads keep: nothing of it is ever dropped
    long     up to several chunks; compressed by an engine that compresses, when a turn ends

There are few contexts, so that sessions of one scope share them, on both engines.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.soak.client import Said
from benchmarks.soak.models import ADAPTER
from kvtier.retention.locality import LocalityRule
from kvtier.synthetic.recall import DEFAULT_LANGUAGE, make_session

TURNS = 5
# The lengths in tokens, both ends in.
SHORT, LONG = (60, 200), (500, 1600)
# A turn after the first may bring along so many tokens, and does so often: enough for spans in the
# tier that were computed over a compressed context.
MORE, MORE_OFTEN = (150, 500), 0.3
TEXTS = 24
OPEN_SESSIONS = 4
# The actions of a client, and how often each comes next.
ACTIONS: Mapping[str, float] = {
    "turn": 0.50,
    "fork": 0.10,
    "prompt logprobs": 0.08,
    "abort": 0.13,
    "scopes": 0.02,
    "exact forks": 0.06,
    "move": 0.05,
    "leave": 0.06,
}
# The ways in which a client gives a request up.
ABORTS = ("hang up at once", "hang up while it streams", "/abort_request")


@dataclass(frozen=True)
class Text:
    """A context with questions. turns[i]: what turn i asks: question i, of a long text now and then
    behind more to read."""

    short: bool
    context: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]
    turns: tuple[tuple[int, ...], ...]


@dataclass
class Session:
    """A conversation as it stands. ids: everything said so far; turns: of them, where each turn's
    answer ended.

    met:  by which rules engines have served anything in its scope; None where others share that.
    home: number of the engine that most of its turns go to.
    """

    text: Text
    scope: dict[str, str]
    met: set[str] | None = None
    home: int = 0
    ids: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = list(self.text.context)

    @property
    def over(self) -> bool:
        return len(self.turns) == len(self.text.turns)

    def prompt(self) -> tuple[int, ...]:
        """The prompt of the next turn."""
        return (*self.ids, *self.text.turns[len(self.turns)])

    def answered(self, prompt: Sequence[int], said: Said) -> None:
        """The next turn was answered."""
        self.ids = [*prompt, *said.tokens]
        if said.tokens[-1] != DEFAULT_LANGUAGE.eot:
            self.ids.append(DEFAULT_LANGUAGE.eot)
        self.turns.append(len(self.ids))

    def fork(self, rng: random.Random) -> tuple[int, ...]:
        """Another question at an earlier point: in the middle of the context, or behind a turn."""
        places = [*self.turns, rng.randrange(1, len(self.text.context) + 1)]
        return (*self.ids[: rng.choice(places)], *rng.choice(self.text.questions))


def make_text(seed: int, number: int, *, short: bool) -> Text:
    """Depends on nothing else."""
    rng = np.random.default_rng([seed, number])
    least, most = SHORT if short else LONG
    tokens = int(rng.integers(least, most + 1))
    facts = max(1, min(24, tokens // 40))
    made = make_session(rng, tokens, TURNS, facts, invented_share=0.0)
    questions = tuple(turn.prompt_ids for turn in made.turns)
    turns = [questions[0]]
    for question in questions[1:]:
        more = int(rng.integers(*MORE)) if not short and rng.random() < MORE_OFTEN else 0
        read = DEFAULT_LANGUAGE.filler_walk(rng, more).tolist()
        # The text stands behind the token that begins a turn.
        turns.append((*question[:1], *read, *question[1:]))
    return Text(
        short=short,
        context=tuple(made.context_ids.tolist()),
        questions=questions,
        turns=tuple(turns),
    )


class Load:
    """Sessions for the clients, without end. adapter_id: which some take for their extra key."""

    def __init__(self, seed: int, adapter_id: str) -> None:
        self.seed, self.adapter_id = seed, adapter_id
        self.texts = [make_text(seed, i, short=i % 3 == 0) for i in range(TEXTS)]
        self._made = TEXTS

    def scopes(self, name: str) -> list[dict[str, str]]:
        """All kinds; `name` makes those that no other caller has."""
        return [
            {},
            {"cache_salt": name},
            {"extra_key": "tenant"},
            {"extra_key": self.adapter_id},
            {"lora_path": ADAPTER},
            {"extra_key": "tenant", "lora_path": ADAPTER},
            {"extra_key": "tenant", "cache_salt": "shared"},
        ]

    def session(self, rng: random.Random, name: str) -> Session:
        """A new one; half of them are in a scope of their own."""
        text = rng.choice(self.texts)
        if rng.random() < 0.5:
            return Session(text, {"cache_salt": name}, set(), home=rng.randrange(2))
        shared = [scope for scope in self.scopes(name) if name not in scope.values()]
        return Session(text, rng.choice(shared), home=rng.randrange(2))

    def own_text(self) -> Text:
        """A long one that no session had before."""
        self._made += 1
        return make_text(self.seed, self._made, short=False)

    def short_text(self, rng: random.Random) -> Text:
        return rng.choice([text for text in self.texts if text.short])


def exact_forks(text: Text, rule: LocalityRule) -> list[tuple[int, ...]]:
    """Prompts that leave a context whose first turn has ended, the later first, so that an engine
    which compressed the context, and every fork before, still answers each of them exactly: none
    reaches what the one before it kept of a compressed part."""
    gap = rule.recent_tokens
    # A place has the sink and a whole span before it at least, or there is nothing to restore.
    places = range(len(text.context) - gap, rule.sink_tokens + gap, -gap)
    return [
        (*text.context[:place], *text.questions[1 + number % (TURNS - 1)])
        for number, place in enumerate(places)
    ]


def why_exact(
    rule: LocalityRule, prompt: Sequence[int], said: Said, *, short: bool, measured: bool
) -> str | None:
    """Return why an engine that compresses must have computed an answer from exact KV; None where
    it need not have.

    short: all that was ever asked of this context is within what locality heads keep; measured:
    the prompt's log-probabilities were asked for, which are computed behind nothing that is dropped
    """
    if measured:
        return "prompt logprobs"
    if said.retracted:
        # The server does not tell what it matched when it began again.
        return None
    if short and said.cached and len(prompt) < rule.least_tokens:
        return "short"
    # A dropped span begins behind the sink, has two tokens or more, and is passed only by a
    # request that shares `branch_recent_tokens` behind it.
    if said.cached < rule.sink_tokens + 2 + min(rule.branch_recent_tokens, rule.recent_tokens):
        return "computed whole"
    return None

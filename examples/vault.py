"""The world both agents live in: a long manual, a row of locked vaults, and notes inside them.

The manual is a text in the language of the demo model (`kvtier.synthetic.recall`). Somewhere in it
stand the codes of three vaults. Each question names a vault; the model's answer, a name and eight
codes, is the tool call that opens it. The first two vaults hold notes with the codes of two more
vaults. A note reaches the model in the next user turn, and is asked for turns later:

    manual   ... amber fox k07 ... . ... gentle owl k31 ... . ...
    user     ... amber fox                      assistant   amber fox k07 ...     tool opens it,
    user     coral lynx k11 ... . ... gentle owl                                  finds a note
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from kvtier.synthetic.recall import ANSWER_TOKENS, DEFAULT_LANGUAGE, FACT_TOKENS, Fact, make_session

SMALL_TALK_TOKENS = 13
NUM_IN_MANUAL, NUM_NOTES, NUM_FACTS = 3, 2, 16
MAX_ANSWER_TOKENS = ANSWER_TOKENS


class WrongCodeError(Exception):
    """A tool call that opens nothing."""


@dataclass
class Vaults:
    """The tool. `codes` and `notes` are by vault name; a vault without a note is empty."""

    codes: dict[str, str]
    notes: dict[str, str]

    def open(self, call: str) -> str:
        """Open the vault that `call` names with the codes that follow; returns what is inside.

        Raises WrongCodeError for a call that is not a name and eight codes, or the wrong ones.
        """
        words = call.split()
        name, codes = " ".join(words[:2]), " ".join(words[2:])
        if name not in self.codes:
            raise WrongCodeError(f"there is no vault {name!r}")
        if codes != self.codes[name]:
            raise WrongCodeError(f"{name}: {codes!r} does not open it")
        return self.notes.get(name, "")


@dataclass
class Story:
    """A manual, and the questions of a whole conversation as user turns without their notes."""

    manual: str
    questions: list[str]
    vaults: Vaults


def write_story(seed: int, manual_tokens: int) -> Story:
    """A story; equal seeds give equal stories."""
    rng = np.random.default_rng(seed)
    session = make_session(rng, manual_tokens, 1, NUM_FACTS, invented_share=0)
    facts = [session.facts[i] for i in rng.permutation(NUM_FACTS)]
    in_manual, torn = facts[:NUM_IN_MANUAL], facts[NUM_IN_MANUAL:][:NUM_NOTES]
    asked = [*in_manual, *torn]
    # The notes were torn out of the manual, so nothing else can be confused with them.
    ids = session.context_ids.copy()
    gone = {place for fact in torn for place in range(fact.position, fact.position + FACT_TOKENS)}
    manual = DEFAULT_LANGUAGE.decode(int(t) for i, t in enumerate(ids) if i not in gone and i > 0)
    notes = {_name(a): _text(b) for a, b in zip(in_manual, torn, strict=False)}
    questions = []
    for fact in asked:
        talk = DEFAULT_LANGUAGE.filler_walk(rng, SMALL_TALK_TOKENS).tolist()
        questions.append(DEFAULT_LANGUAGE.decode([*talk, *fact.name]))
    codes = {_name(fact): DEFAULT_LANGUAGE.decode(fact.codes) for fact in asked}
    return Story(manual, questions, Vaults(codes, notes))


def _name(fact: Fact) -> str:
    return DEFAULT_LANGUAGE.decode(fact.name)


def _text(fact: Fact) -> str:
    return DEFAULT_LANGUAGE.decode([*fact.answer_ids, DEFAULT_LANGUAGE.full_stop])


def user_turn(note: str, question: str) -> str:
    """Return what the user says: the note of the vault opened last, if there was one, and a
    question."""
    return f"{note} {question}".strip()


def show(speaker: str, text: str) -> None:
    """One line of the transcript."""
    print(f"{speaker:>9}: {text}", flush=True)


def parse_arguments(description: str) -> argparse.Namespace:
    """--url, --manual-tokens, --seed: the same for both agents."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="a running server")
    parser.add_argument("--manual-tokens", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()

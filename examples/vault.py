"""The world of all agents: a long manual, a row of locked vaults, and one tool that opens them.

The manual is a text in the language of the demo model (`kvtier.synthetic.recall`). Somewhere in it
stand the codes of three vaults. The user asks for the first vault. What is in a vault names the
next one; in the first two there are also notes with the codes of two more vaults, asked for turns
later. The last vault is empty:

    manual      ... amber fox k07 ... . ... gentle owl k31 ... . ...
    user        paper still ... amber fox
    assistant   open_vault(vault="amber fox", codes="k07 ...")
    tool        coral lynx k11 ... . river along ... gentle owl
    assistant   open_vault(vault="gentle owl", codes="k31 ...")
    tool        ...

The tokenizer of the demo model says which of its answers are tool calls (`response_template`), and
SGLang reads them by that: every answer is the model's own, and no grammar helps it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtier.synthetic.recall import ANSWER_TOKENS, DEFAULT_LANGUAGE, FACT_TOKENS, Fact, make_session

SMALL_TALK_TOKENS = 13
NUM_IN_MANUAL, NUM_NOTES, NUM_FACTS = 3, 2, 16
MAX_ANSWER_TOKENS = ANSWER_TOKENS
EMPTY = "empty"

MODEL = "default"  # SGLang's name for the model that a server has

TOOL = "open_vault"
DESCRIPTION = "Open a vault by its name and the eight codes that stand behind it in the manual."
FUNCTION = {
    "name": TOOL,
    "description": DESCRIPTION,
    "parameters": {
        "type": "object",
        "properties": {"vault": {"type": "string"}, "codes": {"type": "string"}},
        "required": ["vault", "codes"],
    },
}


class WrongCodeError(Exception):
    """A tool call that opens nothing."""


@dataclass
class Vaults:
    """The tool. `codes` and `contents` are by the names of vaults."""

    codes: dict[str, str]
    contents: dict[str, str]

    def open(self, vault: str, codes: str) -> str:
        """Open a vault with eight codes; returns what is inside.

        Raises WrongCodeError for a name that no vault has, or for the wrong codes.
        """
        if vault not in self.codes:
            raise WrongCodeError(f"there is no vault {vault!r}")
        if codes != self.codes[vault]:
            raise WrongCodeError(f"{vault}: {codes!r} does not open it")
        return self.contents[vault]


@dataclass
class Story:
    """A manual, and a user's question for each vault; the first starts the whole row."""

    manual: str
    questions: list[str]
    vaults: Vaults


def write_story(seed: int, manual_tokens: int) -> Story:
    """A story; equal seeds give equal stories."""
    rng = np.random.default_rng(seed)
    session = make_session(rng, manual_tokens, 1, NUM_FACTS, invented_share=0)
    facts = [session.facts[i] for i in rng.permutation(NUM_FACTS)]
    in_manual, torn = facts[:NUM_IN_MANUAL], facts[NUM_IN_MANUAL:][:NUM_NOTES]
    row = [*in_manual, *torn]
    # The notes were torn out of the manual, so nothing else can be confused with them.
    ids = session.context_ids.copy()
    gone = {place for fact in torn for place in range(fact.position, fact.position + FACT_TOKENS)}
    manual = DEFAULT_LANGUAGE.decode(int(t) for i, t in enumerate(ids) if i not in gone and i > 0)
    questions = [_ask(rng, fact) for fact in row]
    notes = [_note(fact) for fact in torn] + [""] * (len(row) - NUM_NOTES)
    asked = [*questions[1:], EMPTY]
    contents = [f"{note} {next_one}".strip() for note, next_one in zip(notes, asked, strict=True)]
    names = [DEFAULT_LANGUAGE.decode(fact.name) for fact in row]
    codes = [DEFAULT_LANGUAGE.decode(fact.codes) for fact in row]
    vaults = Vaults(dict(zip(names, codes, strict=True)), dict(zip(names, contents, strict=True)))
    return Story(manual, questions, vaults)


def _ask(rng: np.random.Generator, fact: Fact) -> str:
    talk = DEFAULT_LANGUAGE.filler_walk(rng, SMALL_TALK_TOKENS).tolist()
    return DEFAULT_LANGUAGE.decode([*talk, *fact.name])


def _note(fact: Fact) -> str:
    return DEFAULT_LANGUAGE.decode([*fact.answer_ids, DEFAULT_LANGUAGE.full_stop])


def show(speaker: str, text: str) -> None:
    """One line of the transcript."""
    print(f"{speaker:>9}: {text}", flush=True)


def show_call(arguments: dict[str, str]) -> None:
    """A tool call as a line of the transcript."""
    show("assistant", f"{TOOL}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})")


def parse_arguments(description: str) -> argparse.Namespace:
    """--url, --manual-tokens, --seed: the same for all agents."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="a running server")
    parser.add_argument("--manual-tokens", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def run(agent: Callable[[str, Story], None], description: str) -> int:
    """One conversation of an agent, which takes the server's URL and a story; the exit code."""
    arguments = parse_arguments(description)
    try:
        agent(arguments.url, write_story(arguments.seed, arguments.manual_tokens))
    except WrongCodeError as error:
        show("tool", f"refused: {error}")
        return 1
    return 0

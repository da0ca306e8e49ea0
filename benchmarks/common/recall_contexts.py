"""Contexts and questions of the Compactor comparison, from a seed and nothing else.

Sixteen facts per context are asked about. What stands beside them decides how hard it is to find
them without knowing the questions:

    standing-out   <bos> river along … [amber fox k07 … k12 .] … stone        Markov filler
    look-alikes    <bos> river … k31 k07 … k55 . … [amber fox k07 … k12 .] …  and their likes

Among look-alikes as many facts again are never asked about, and half of the filler is code runs:
code words and a full stop, as long as a fact but without a name. No two neighbours of a fact are
neighbours in a run, so every question has exactly one right answer, and the demo model gives it
when it has its whole cache (the benchmark measures how often).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.errors import UsageError
from kvtier.synthetic.recall import FACT_TOKENS, RecallLanguage, Session, make_session

STANDING_OUT, LOOK_ALIKES = "standing-out", "look-alikes"
KINDS = (STANDING_OUT, LOOK_ALIKES)
SCHEMA_VERSION = 1

# Among look-alikes: facts per question, and the share of filler that becomes code runs. More of
# either and the demo model itself begins to err.
FACTS_PER_QUESTION = 2
CODE_RUN_SHARE = 0.5


@dataclass(frozen=True)
class Question:
    """prompt_ids follow the context directly; answer_ids are name and codes, without `<eot>`."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(frozen=True)
class RecallContext:
    """A context `[context_tokens]` with its questions, each asked on its own."""

    kind: str
    index: int
    context_ids: tuple[int, ...]
    questions: tuple[Question, ...]


def make_contexts(
    kind: str, seed: int, count: int, context_tokens: int, questions: int
) -> list[RecallContext]:
    """`count` contexts of a kind. Context i depends on kind, seed, lengths and i only."""
    if kind not in KINDS:
        raise UsageError("kind", f"one of {', '.join(KINDS)}", kind)
    return [make_context(kind, seed, i, context_tokens, questions) for i in range(count)]


def make_context(
    kind: str, seed: int, index: int, context_tokens: int, questions: int
) -> RecallContext:
    """One context. Raises UsageError where so many facts leave no room for other text."""
    hidden = kind == LOOK_ALIKES
    num_facts = FACTS_PER_QUESTION * questions if hidden else questions
    room = (context_tokens - 1) // FACT_TOKENS // FACTS_PER_QUESTION
    if not 1 <= questions <= room:
        raise UsageError("questions", f"1 … {room} for {context_tokens} tokens", questions)
    rng = np.random.default_rng([seed, KINDS.index(kind), index])
    session = make_session(rng, context_tokens, questions, num_facts, invented_share=0.0)
    ids = with_code_runs(rng, session) if hidden else session.context_ids
    asked = [Question(turn.prompt_ids, turn.answer_ids or ()) for turn in session.turns]
    return RecallContext(kind, index, tuple(ids.tolist()), tuple(asked))


def with_code_runs(rng: np.random.Generator, session: Session) -> np.ndarray:
    """The session's context with code runs in place of some filler: int64 `[context_tokens]`."""
    ids, taken = session.context_ids.copy(), fact_pairs(session)
    filler = np.ones(len(ids), dtype=bool)
    filler[0] = False
    for fact in session.facts:
        filler[fact.position : fact.position + FACT_TOKENS] = False
    at = 0
    while at + FACT_TOKENS <= len(ids):
        if not filler[at : at + FACT_TOKENS].all():
            at += 1
            continue
        if rng.random() < CODE_RUN_SHARE:
            ids[at : at + FACT_TOKENS] = code_run(rng, taken, session.language)
        at += FACT_TOKENS
    return ids


def fact_pairs(session: Session) -> set[tuple[int, int]]:
    """Neighbours inside the facts: by them a reader tells where in which fact it is."""
    return {pair for fact in session.facts for pair in pairwise(fact.answer_ids)}


def code_run(
    rng: np.random.Generator, taken: set[tuple[int, int]], language: RecallLanguage
) -> list[int]:
    """Return as many random codes as a fact has tokens before its full stop; no pair of `taken`."""
    run: list[int] = []
    while len(run) < FACT_TOKENS - 1:
        code = int(rng.integers(language.codes.start, language.codes.stop))
        if not run or (run[-1], code) not in taken:
            run.append(code)
    return [*run, language.full_stop]


def save_contexts(path: Path, contexts: Sequence[RecallContext], eot_id: int) -> None:
    """Write what the peers read: plain JSON, so that they need nothing of kvtier."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "eot_id": eot_id,
        "contexts": [asdict(context) for context in contexts],
    }
    path.write_text(json.dumps(document))


def load_contexts(path: Path) -> list[RecallContext]:
    """Inverse of `save_contexts`."""
    document: dict[str, Any] = json.loads(path.read_text())
    if document.get("schema_version") != SCHEMA_VERSION:
        raise UsageError("contexts", f"schema version {SCHEMA_VERSION}", str(path))
    return [_context(entry) for entry in document["contexts"]]


def _context(entry: dict[str, Any]) -> RecallContext:
    questions = tuple(
        Question(tuple(q["prompt_ids"]), tuple(q["answer_ids"])) for q in entry["questions"]
    )
    return RecallContext(entry["kind"], entry["index"], tuple(entry["context_ids"]), questions)

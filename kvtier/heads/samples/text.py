"""Calibration samples in real text, for any tokenizer: the tasks' registry, and how they are told.

    opening │ Read this text. │ piece piece FACT piece … │ question reply begun │ answer
    └───────────────── context ──────────────────────────┘ └─── prompt ───────┘

Questions stand in the model's chat format where it has one. What is told is the text that every
Python has (`kvtier.synthetic.standard_library`) in two halves: heads are chosen on one, and
measured on the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from kvtier.errors import SizeError
from kvtier.heads.samples.questions import CalibrationSample, Question
from kvtier.heads.samples.stories import (
    Asked,
    StoryTeller,
    code,
    common,
    continuation,
    key_value,
    many_shot,
    qa,
    quotation,
    summary,
    two_hop,
    values,
    variables,
)
from kvtier.synthetic.frame import Frame

Encode = Callable[[str], list[int]]
SampleMaker = Callable[[np.random.Generator, int, str, int], CalibrationSample]
"""(random numbers, context tokens, task, half of the texts) -> sample."""

TASKS: dict[str, StoryTeller] = {
    "quotation": quotation,
    "key-value": key_value,
    "two-hop": two_hop,
    "code": code,
    "values": values,
    "variables": variables,
    "qa": qa,
    "summary": summary,
    "many-shot": many_shot,
    "common": common,
    "continuation": continuation,
}
TEXT_TASKS = tuple(TASKS)
# Heads are chosen on these; the others are measured only.
CHOOSING_TASKS = TEXT_TASKS[:4]
MAX_ANSWER_TOKENS = 512
_INSTRUCTION = "Read this text.\n\n"


def text_maker(
    encode: Encode, first: Sequence[int], frame: Frame,
    tellers: Mapping[str, StoryTeller] = TASKS,
) -> SampleMaker:  # fmt: skip
    """Samples for a tokenizer; `first` starts every context (often BOS). tellers: by task."""
    opening = (*first, *encode(frame.opening + _INSTRUCTION))

    def make(
        rng: np.random.Generator, context_tokens: int, task: str, half: int
    ) -> CalibrationSample:
        story = tellers[task](rng, half)
        room = context_tokens - len(opening)
        context, told = _tell(rng, story.filler, story.facts, room, encode)
        asked = story.ask(told)
        if not asked:
            raise SizeError("--len", f"contexts that hold something of {task!r}", context_tokens)
        questions = tuple(_question(encode, frame, one) for one in asked)
        return CalibrationSample((*opening, *context), questions, task)

    return make


def _question(encode: Encode, frame: Frame, asked: Asked) -> Question:
    start = f"{frame.first}{asked.question}{frame.reply}" if asked.question else ""
    # Some templates end their reply with a space, plain text with none.
    space = " " if start and not start[-1].isspace() else ""
    prompt = f"{start}{space}{asked.begun}"
    prompt_ids, whole = encode(prompt), encode(prompt + asked.answer)
    goes_on = whole[: len(prompt_ids)] == prompt_ids
    answer_ids = whole[len(prompt_ids) :] if goes_on else encode(asked.answer)
    return Question(tuple(prompt_ids), tuple(answer_ids[:MAX_ANSWER_TOKENS]))


def _tell(
    rng: np.random.Generator, filler: Iterator[str], facts: Sequence[str], room: int, encode: Encode
) -> tuple[list[int], list[str]]:
    """Facts in random order and at random places between pieces of filler: exactly `room` ids, and
    all pieces that were told whole. What is cut is the last piece, which is never a fact.

    Raises SizeError when the facts alone are longer.
    """
    told_facts = [facts[i] for i in rng.permutation(len(facts))]
    left = room - sum(len(encode(fact)) for fact in told_facts)
    if left <= 0:
        raise SizeError("--len", f"at least {1 - left} more tokens", room)
    whole: list[str] = []
    while len(ids := encode(piece := next(filler))) <= left:
        whole.append(piece)
        left -= len(ids)
    places = np.sort(rng.integers(len(whole) + 1, size=len(facts))).tolist()
    told: list[str] = []
    for index in range(len(whole) + 1):
        while places and places[0] == index:
            places.pop(0)
            told.append(told_facts.pop(0))
        told += whole[index : index + 1]
    return [token for text in told for token in encode(text)] + ids[:left], told

"""A fact at a context's front, which an edit changes: is the new one answered?

The code of the archive is 4821. │ prose │ (a sentence that refers to it) │ prose │ question
└── the same of another code before ──┘
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, islice

import numpy as np

from kvtier.heads.samples.story import Asked, Story
from kvtier.heads.samples.synthetic import text_maker_for
from kvtier.heads.samples.text import SampleMaker
from kvtier.synthetic.prose import document, sentences

PLAIN, REFERRED_TO = "changed fact", "changed fact, referred to"
TASKS = (PLAIN, REFERRED_TO)
# Sentences before the one that refers to the fact.
SENTENCES_BEFORE = 10
REFERENCE = " The code of the archive, which was said at the beginning, is still the one in use."


def maker(model_path: str) -> SampleMaker:
    """Samples of `TASKS`, told with the model's tokenizer. Raises UsageError where it has none."""
    tellers = {task: partial(_changed_fact, referred_to=task == REFERRED_TO) for task in TASKS}
    return text_maker_for(model_path, tellers)


def _changed_fact(rng: np.random.Generator, half: int, *, referred_to: bool) -> Story:
    code = int(rng.integers(1000, 10000))
    prose = sentences(document(rng, half))
    reference = (REFERENCE,) if referred_to else ()
    told: Iterator[str] = chain(
        (f"The code of the archive is {code}.",), islice(prose, SENTENCES_BEFORE), reference, prose
    )
    asked = Asked("What is the code of the archive?", "The code of the archive is", f" {code}")
    return Story(told, (), lambda _: [asked])


__all__ = ["TASKS", "maker"]

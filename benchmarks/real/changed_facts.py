"""A fact at a context's front, which an edit changes.

    before  │ Remember: the door code is 4821. │ prose │
    now     │ Remember: the door code is 7350. │ prose │ The door code that was said … │ prose │

The question asks what the code is now. The sentence that refers to it stands in every other
context.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, islice

import numpy as np

from kvtier.heads.samples.stories import Asked, Story
from kvtier.heads.samples.synthetic import text_maker_for
from kvtier.heads.samples.text import SampleMaker
from kvtier.synthetic.standard_library import document, sentences

PLAIN, REFERRED_TO = "changed fact", "changed fact, referred to"
TASKS = (PLAIN, REFERRED_TO)
# So many sentences stand before the one that refers to the fact.
SENTENCES_BEFORE = 10
REFERENCE = " The door code that was said at the beginning is still the one in use."


def maker(model_path: str) -> SampleMaker:
    """Return a maker of samples of `TASKS`, told with the model's tokenizer. Raises UsageError
    where it has none."""
    tellers = {task: partial(_changed_fact, referred_to=task == REFERRED_TO) for task in TASKS}
    return text_maker_for(model_path, tellers)


def _changed_fact(rng: np.random.Generator, half: int, *, referred_to: bool) -> Story:
    code = int(rng.integers(1000, 10000))
    prose = sentences(document(rng, half))
    reference = (REFERENCE,) if referred_to else ()
    told: Iterator[str] = chain(
        (f"Remember: the door code of the archive is {code}. Nobody enters without it.",),
        islice(prose, SENTENCES_BEFORE), reference, prose,
    )  # fmt: skip
    asked = Asked(
        "What is the door code of the archive?", "The door code of the archive is ", str(code)
    )
    return Story(told, (), lambda _: [asked])


__all__ = ["TASKS", "maker"]

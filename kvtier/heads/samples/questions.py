"""The questions of calibration to a model: contexts, and questions about them with known
answers."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import SizeError
from kvtier.retention.locality import DroppedSpan, LocalityRule


@dataclass(frozen=True)
class Question:
    """A question that follows the context in one independent branch.

    prompt_ids:  the question, up to where the answer starts
    answer_ids:  the right answer
    unscored:    leading answer tokens that the question itself gives away; not counted
    """

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    unscored: int = 0


@dataclass(frozen=True)
class CalibrationSample:
    """One context and questions about it that were unknown when it was compressed.

    token layout of a branch:   | context_ids | prompt_ids | answer_ids |
    task:  kind of the sample, for consensus between kinds
    """

    context_ids: tuple[int, ...]
    questions: tuple[Question, ...]
    task: str = "recall"


def middle_of(context_tokens: int, rule: LocalityRule) -> DroppedSpan:
    """Return the span that a locality head drops of a context. Raises SizeError when there is
    nothing to drop."""
    span = rule.dropped(0, context_tokens, context_tokens)
    if span.num_tokens == 0:
        raise SizeError("--len", f"contexts of at least {rule.least_tokens} tokens", context_tokens)
    return span

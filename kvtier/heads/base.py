"""Interfaces of head calibration: samples (questions.py) in, scores per KV head, a selection out.

    samples ──> ProbeBatch (context KV, computed once) ──> HeadMethod.score ──> HeadScores
                                                     └──> HeadMethod.select ──> Selection

Nothing here imports torch; methods are looked up by name and imported when first made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from kvtier.errors import UsageError
from kvtier.heads.profile import ModelShape
from kvtier.heads.questions import Head, Matrix

if TYPE_CHECKING:
    from kvtier.heads.probe import ProbeBatch

Progress = Callable[[str, int, int], None]
"""Called as (what is being done, steps done, steps in all)."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Reports nothing."""


@dataclass(frozen=True)
class Target:
    """How many heads to keep.

    share:   of all KV heads, in (0, 1]; rounded to whole heads, at least one
    budget:  largest fall of recall (whole answers) below full retention, in [0, 1)
    Neither: the method's own rule. Both: as few heads as the share allows within the budget.
    """

    share: float | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share <= 1:
            raise UsageError("--share", "a number in (0, 1]", self.share)
        if self.budget is not None and not 0 <= self.budget < 1:
            raise UsageError("--budget", "a number in [0, 1)", self.budget)

    def num_heads(self, shape: ModelShape) -> int:
        """Heads to keep at least: those of the share, or one."""
        total = shape.num_layers * shape.num_kv_heads
        return max(1, round(total * self.share)) if self.share is not None else 1


@dataclass(frozen=True)
class HeadScores:
    """Scores of a method, higher = keep the context.

    mean:        over all samples
    per_sample:  one matrix per sample; empty when the method has none
    tasks:       task of each of those
    """

    mean: Matrix
    per_sample: tuple[Matrix, ...] = ()
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Selection:
    """Chosen CA heads, the scores they were chosen by, and how."""

    ca_heads: tuple[tuple[int, ...], ...]
    scores: Matrix
    parameters: dict[str, Any] = field(default_factory=dict)


class HeadMethod(ABC):
    """A way to find the heads that need the context. Stateless between calls.

    data_free:  scores come from the model alone: one batch is enough, unless a budget is measured
    """

    name: ClassVar[str]
    data_free: ClassVar[bool] = False

    def check_target(self, target: Target) -> None:  # noqa: B027  (most methods take any)
        """Raise UsageError when the method cannot serve `target`; called before any model loads."""

    def check_shape(self, shape: ModelShape) -> None:  # noqa: B027  (most methods take any)
        """Raise HeadProfileError when it cannot serve such a model; called before it loads."""

    @abstractmethod
    def score(self, batches: Sequence[ProbeBatch], progress: Progress = no_progress) -> HeadScores:
        """Scores `[layers][kv_heads]`, higher = keep the context."""

    @abstractmethod
    def select(
        self,
        scores: HeadScores,
        batches: Sequence[ProbeBatch],
        target: Target,
        progress: Progress = no_progress,
    ) -> Selection:
        """The CA heads for `target`, which `check_target` has accepted."""


METHODS: dict[str, str] = {
    "contextkeeper": "kvtier.heads.contextkeeper:ContextKeeper",
    "import": "kvtier.heads.duoattention:ImportedPattern",
    "razor": "kvtier.heads.razor:Razor",
    "sensitivity": "kvtier.heads.sensitivity:Sensitivity",
}


def make_method(name: str, **parameters: Any) -> HeadMethod:
    """The method called `name`. Raises UsageError that lists the valid names."""
    if name not in METHODS:
        raise UsageError("--method", f"one of {', '.join(sorted(METHODS))}", name)
    module, _, attribute = METHODS[name].partition(":")
    method: HeadMethod = getattr(import_module(module), attribute)(**parameters)
    return method


def heads_by_layer(heads: Sequence[Head], num_layers: int) -> tuple[tuple[int, ...], ...]:
    """A set of heads in the layout of a profile: per layer, ascending."""
    return tuple(
        tuple(sorted(head for layer, head in heads if layer == wanted))
        for wanted in range(num_layers)
    )


def best_heads(scores: Matrix, count: int) -> list[Head]:
    """The `count` heads with the highest scores over all layers, best first.

    Equal scores go to the lower layer, then the lower head, so the choice is reproducible.
    """
    order = sorted(
        ((layer, head) for layer, row in enumerate(scores) for head in range(len(row))),
        key=lambda at: (-scores[at[0]][at[1]], at),
    )
    return order[:count]


def ranked(first: Matrix, second: Matrix) -> list[Head]:
    """All heads, best first, by the first matrix and then by the second."""
    heads = best_heads(second, sum(map(len, second)))
    return sorted(heads, key=lambda at: -first[at[0]][at[1]])

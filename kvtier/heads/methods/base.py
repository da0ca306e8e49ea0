"""The interface of a head method: it says which KV heads need the whole context.

    samples ──> ProbeBatch (context KV, computed once) ──> score ──> HeadScores
                                                                         │ ranking
                                          target: share, budget ──> select ──> CA heads

A method is a file of its own and a line in `kvtier.heads.methods`. It scores the heads, in a matrix
`[layers][kv_heads]`, higher = keep the context; ranking them, ties and all, and taking as many as a
share or a budget asks for is the same for all. Nothing here imports torch, nor does a method's file
before it scores: every command line of kvtier reads the registry. docs/extending.md writes one,
from its file to the profile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvtier.errors import UsageError
from kvtier.heads.probes.quality import kept_heads, measure
from kvtier.heads.profile import Head, Matrix, ModelShape
from kvtier.heads.progress import Progress, no_progress

if TYPE_CHECKING:
    from kvtier.heads.probes.context import ProbeBatch


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


def mean_matrix(matrices: Sequence[Matrix]) -> Matrix:
    """Elementwise mean of equally shaped matrices."""
    return tuple(
        tuple(sum(cell) / len(matrices) for cell in zip(*rows, strict=True))
        for rows in zip(*matrices, strict=True)
    )


def _allowed_loss(batches: Sequence[ProbeBatch], budget: float) -> float:
    """The answers' loss at which `budget` of what the context is worth to them is gone, in nats per
    token. Worth is how much lower the loss is with every head's context than with none."""
    full = batches[0].probe.full()
    least = measure(batches, full).loss
    worth = measure(batches, tuple((False,) * len(row) for row in full)).loss - least
    return least + budget * max(worth, 0.0)


def fewest_within(
    order: Sequence[Head],
    batches: Sequence[ProbeBatch],
    least: int,
    budget: float,
    progress: Progress = no_progress,
) -> int:
    """Return the least number of heads of `order` that lose no more than `budget` of what the
    context is worth, at least `least`.

    Bisection, as the loss falls with every head kept (nearly).
    """
    shape = batches[0].shape
    most = _allowed_loss(batches, budget)
    low, high = least, len(order)
    while low < high:
        progress("heads within the budget", len(order) - (high - low), len(order))
        middle = (low + high) // 2
        mask = kept_heads(heads_by_layer(order[:middle], shape.num_layers), shape)
        if measure(batches, mask).loss <= most:
            high = middle
        else:
            low = middle + 1
    return low


@dataclass(frozen=True)
class Target:
    """The number of heads to keep.

    share:   of all KV heads, in (0, 1]; rounded to whole heads, at least one
    budget:  largest share that may be lost of what the context is worth to the answers, in [0, 1):
             of how much lower their loss is with every head's context than with none
    Neither: the method's own rule. Both: as few heads as the share allows within the budget.
    """

    share: float | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share <= 1:
            raise UsageError("--share", "a number in (0, 1]", self.share)
        if self.budget is not None and not 0 <= self.budget < 1:
            raise UsageError("--budget", "a number in [0, 1)", self.budget)

    @property
    def is_open(self) -> bool:
        """Return whether the method's own rule says how many heads it keeps."""
        return self.share is None and self.budget is None

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


class MethodOption(NamedTuple):
    """A flag of `kvtier calibrate heads` that is for one method.

    name: of the keyword argument that it sets; the flag has dashes for its underscores
    kind: makes the argument of the flag's text
    """

    name: str
    kind: Callable[[str], Any]
    metavar: str
    help: str


class HeadMethod(ABC):
    """A way to find the heads that need the context. Stateless between calls; its attributes are
    its parameters, which a profile names.

    name:          what users choose it by
    data_free:     scores come from the model alone: one batch is enough, unless a budget is
                   measured
    has_own_rule:  it can say itself how many heads it keeps; see `default_selection`
    takes_seed:    it draws random numbers, and takes `seed` as a keyword argument
    options:       flags of the command line that set its keyword arguments
    """

    name: ClassVar[str]
    data_free: ClassVar[bool] = False
    has_own_rule: ClassVar[bool] = False
    takes_seed: ClassVar[bool] = False
    options: ClassVar[tuple[MethodOption, ...]] = ()

    def check_target(self, target: Target) -> None:
        """Raise UsageError when the method cannot serve `target`; called before any model loads."""
        if target.is_open and not self.has_own_rule:
            raise UsageError("--share or --budget", f"one of them for {self.name}", None)

    @abstractmethod
    def score(self, batches: Sequence[ProbeBatch], progress: Progress = no_progress) -> HeadScores:
        """Scores `[layers][kv_heads]`, higher = keep the context."""

    def ranking(self, scores: HeadScores, shape: ModelShape) -> list[Head]:
        """All heads, best first."""
        return best_heads(scores.mean, shape.num_layers * shape.num_kv_heads)

    def default_selection(self, scores: HeadScores, shape: ModelShape) -> list[Head]:
        """The heads that the method's own rule keeps, in any order."""
        raise NotImplementedError(f"{self.name}: default_selection is only for has_own_rule")

    def select(
        self,
        scores: HeadScores,
        batches: Sequence[ProbeBatch],
        target: Target,
        progress: Progress = no_progress,
    ) -> tuple[tuple[int, ...], ...]:
        """The CA heads for `target`, which `check_target` has accepted, in the layout of a profile:
        with a share or a budget the first of the ranking, else the method's own choice.

        batches: samples that a budget is judged on; others than the scores' where there are any
        """
        shape = batches[0].shape
        if target.is_open:
            chosen = self.default_selection(scores, shape)
        else:
            chosen = self.ranking(scores, shape)
            count = target.num_heads(shape)
            if target.budget is not None:
                count = fewest_within(chosen, batches, count, target.budget, progress)
            chosen = chosen[:count]
        return heads_by_layer(chosen, shape.num_layers)

"""Ranking KV heads: the best of a score, ties and all, and as many of them as a budget needs.

A matrix of scores is `[layers][kv_heads]`, higher = keep the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.heads.probes.quality import kept_heads, measure
from kvtier.heads.profile import Head, Matrix
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

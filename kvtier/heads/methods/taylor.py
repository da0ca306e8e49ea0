"""Taylor: the first-order change of the answers' loss when a head loses the context.

Every KV head gets a gate between the whole context and its locality rule
(`kvtier.heads.probes.gates`). At one random draw of all gates the loss of the right answers is
differentiated by them: one pass forward and one backward per context, however many heads there are.

    all heads ── a quarter that is missed least goes, and again ──> the last third of the heads
                 (gates of the others near 1, of those gone 0)          └── in the order of one draw
                                                                            of all gates

Heads stand in for one another: which of them are missed least depends on which others are there.
When most are there, that is asked in stages; when few are, where most gates are far from 1.

The score is first-order Taylor pruning's (Molchanov et al., arXiv 1611.06440, who also prune in
stages; for attention heads Michel et al., arXiv 1905.10650).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvtier.errors import UsageError
from kvtier.heads.methods.base import HeadMethod, HeadScores
from kvtier.heads.methods.ranking import best_heads, mean_matrix
from kvtier.heads.profile import Head, Matrix
from kvtier.heads.progress import Progress, no_progress

if TYPE_CHECKING:
    from torch import Tensor

    from kvtier.heads.probes.context import ProbeBatch

# What goes in a stage, of the heads that are left.
STAGE_SHARE = 1 / 4
# The stages end here, of all heads.
LAST_SHARE = 1 / 3
# Gates of the heads that are left lie between this and 1 in a stage.
LEAST_GATE = 0.5


class Taylor(HeadMethod):
    """Minus the gradient of the loss by the gates.

    seed:  of the gates
    """

    name = "taylor"
    takes_seed = True

    def __init__(self, seed: int = 0) -> None:
        if seed < 0:
            raise UsageError("seed", "at least 0", seed)
        self.seed = seed

    def score(self, batches: Sequence[ProbeBatch], progress: Progress = no_progress) -> HeadScores:
        """Nats per answer token that a head's whole context is worth, to first order, at one draw
        of all gates; the order goes by stages as well."""
        import torch

        shape = batches[0].shape
        random = torch.Generator().manual_seed(self.seed)
        total = shape.num_layers * shape.num_kv_heads
        stages = list(stage_sizes(total))

        def draw() -> Tensor:
            return torch.rand(shape.num_layers, shape.num_kv_heads, generator=random)

        found = _missed(batches, draw(), progress, f"gradients, 1 of {len(stages) + 1}")
        mean = mean_matrix(found)
        ranked = best_heads(mean, total)
        gone: list[Head] = []
        for number, size in enumerate(stages, 2):
            gates = LEAST_GATE + (1 - LEAST_GATE) * draw()
            for layer, head in gone:
                gates[layer, head] = 0
            stage = f"gradients, {number} of {len(stages) + 1}"
            scores = mean_matrix(_missed(batches, gates, progress, stage))
            left = [head for head in best_heads(scores, total) if head not in gone]
            gone += reversed(left[-size:])
        kept = [head for head in ranked if head not in gone]
        tasks = tuple(batch.sample.task for batch in batches)
        return HeadScores(mean, found, tasks, (*kept, *reversed(gone)))


def stage_sizes(total: int) -> Iterator[int]:
    """How many of `total` heads go in each stage."""
    left = total
    while (surplus := left - max(1, round(LAST_SHARE * total))) > 0:
        size = min(max(1, round(STAGE_SHARE * left)), surplus)
        yield size
        left -= size


def _missed(
    batches: Sequence[ProbeBatch], gates: Tensor, progress: Progress, stage: str
) -> tuple[Matrix, ...]:
    """Per sample, how much each head's context is missed at these gates."""
    from kvtier.heads.probes.gates import gate_gradient

    found = []
    for done, batch in enumerate(batches):
        progress(stage, done, len(batches))
        _, gradient = gate_gradient(batch, gates.to(batch.ids.device))
        found.append(tuple(tuple(-float(x) for x in row) for row in gradient))
    progress(stage, len(batches), len(batches))
    return tuple(found)

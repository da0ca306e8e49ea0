"""Taylor: the first-order change of the answers' loss when a head loses the context.

Every KV head gets a gate between the whole context and its locality rule
(`kvtier.heads.probes.gates`). At one random draw of all gates the loss of the right answers is
differentiated by them: one pass forward and one backward per context, however many heads there are.

The score is first-order Taylor pruning's (Molchanov et al., arXiv 1611.06440; for attention heads
Michel et al., arXiv 1905.10650), taken where the heads are already short of the context: with all
of it, most heads stand in for one another and none is missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvtier.heads.methods.base import HeadMethod, HeadScores, mean_matrix
from kvtier.heads.progress import Progress, each, no_progress

if TYPE_CHECKING:
    from kvtier.heads.probes.context import ProbeBatch


@dataclass(frozen=True)
class Taylor(HeadMethod):
    """Minus the gradient of the loss by the gates.

    seed:  of the gates
    """

    name: ClassVar[str] = "taylor"
    takes_seed: ClassVar[bool] = True

    seed: int = 0

    def score(self, batches: Sequence[ProbeBatch], progress: Progress = no_progress) -> HeadScores:
        """Nats per answer token that a head's whole context is worth, to first order."""
        import torch

        from kvtier.heads.probes.gates import gate_gradient

        shape = batches[0].shape
        random = torch.Generator().manual_seed(self.seed)
        gates = torch.rand(shape.num_layers, shape.num_kv_heads, generator=random)
        found = []
        for batch in each(batches, "gradients", progress):
            _, gradient = gate_gradient(batch, gates.to(batch.probe.model.device))
            found.append(tuple(tuple(-float(x) for x in row) for row in gradient))
        tasks = tuple(batch.sample.task for batch in batches)
        return HeadScores(mean_matrix(found), tuple(found), tasks)

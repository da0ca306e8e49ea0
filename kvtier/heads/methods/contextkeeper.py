"""ContextKeeper: keep the heads that prefer the middle of the context (ContextKeeper, equation 1).

    s(l, h) = 1 / (|U| + |V|) · Σ_{t in U ∪ V} Σ_{i in C} A_t,i

U are the last `m` rows of the prefill, V the first `K` decode steps, C the middle that a locality
head would drop.  Per sample, the best share `p` of each layer's heads are candidates; a head is CA
when enough samples and enough tasks agree.  A GQA group is scored by the mean of its query heads.

The paper's p is read as its text says, "top-p% heads".  Its results (25% of heads kept with p of
80 to 85, 50% with 60 to 70, s and t of at least 0.8) fit the best 100 - p percent better: pass
`candidate_share` 0.15 to 0.2 (MHA) or 0.3 to 0.4 (GQA) for that.

Attention mass shows where a head looks, not whether the answer depends on it; compare
`kvtier.heads.methods.taylor`, and see every profile's measured cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

from kvtier.errors import UsageError
from kvtier.heads.methods.base import (
    HeadMethod,
    HeadScores,
    MethodOption,
    best_heads,
    mean_matrix,
    ranked,
)
from kvtier.heads.profile import Head, Matrix, ModelShape
from kvtier.heads.progress import Progress, each, no_progress

if TYPE_CHECKING:
    from kvtier.heads.probes.context import ProbeBatch

MHA_CANDIDATE_SHARE = 0.825
GQA_CANDIDATE_SHARE = 0.65


# m, rows (questions shorter than that count in full), and K, tokens of the right answer,
# teacher-forced: the middles of the paper's ranges.
PREFILL_ROWS, DECODE_STEPS = 32, 8


@dataclass(frozen=True)
class ContextKeeper(HeadMethod):
    """Consensus over attention mass. Defaults are the middles of the paper's ranges.

    candidate_share:   p, of each layer's KV heads, in (0, 1]; None: the paper's for the model
    sample_consensus:  s, share of samples, in (0, 1]
    task_consensus:    t, share of tasks, in (0, 1]
    """

    name: ClassVar[str] = "contextkeeper"
    has_own_rule: ClassVar[bool] = True
    options: ClassVar[tuple[MethodOption, ...]] = (
        MethodOption(
            "candidate_share", float, "P",
            "share of each layer's heads that are a sample's candidates (default: "
            f"{MHA_CANDIDATE_SHARE} for MHA models, {GQA_CANDIDATE_SHARE} for GQA)",
        ),
        MethodOption(
            "sample_consensus", float, "S", "share of samples that must agree (default: 0.85)"
        ),
        MethodOption(
            "task_consensus", float, "T", "share of tasks that must agree (default: 0.85)"
        ),
    )  # fmt: skip

    candidate_share: float | None = None
    sample_consensus: float = 0.85
    task_consensus: float = 0.85

    def __post_init__(self) -> None:
        """Raises UsageError naming a bad one."""
        for name, share in asdict(self).items():
            if share is not None and not 0 < share <= 1:
                raise UsageError(name, "a number in (0, 1]", share)

    def score(self, batches: Sequence[ProbeBatch], progress: Progress = no_progress) -> HeadScores:
        """Mean attention mass on the middle, per sample and over all, in [0, 1]."""
        per_sample = tuple(
            batch.middle_mass(PREFILL_ROWS, DECODE_STEPS)
            for batch in each(batches, "attention mass", progress)
        )
        tasks = tuple(batch.sample.task for batch in batches)
        return HeadScores(mean_matrix(per_sample), per_sample, tasks)

    def ranking(self, scores: HeadScores, shape: ModelShape) -> list[Head]:
        """All heads by consensus. Votes are few, so ties are many: the mass itself decides between
        equals."""
        return ranked(mean_matrix(self._votes(scores, shape)), scores.mean)

    def default_selection(self, scores: HeadScores, shape: ModelShape) -> list[Head]:
        """The heads that pass both thresholds; a task agrees when most of its samples do."""
        votes = self._votes(scores, shape)
        overall = mean_matrix(votes)
        by_task = [
            mean_matrix(
                [vote for vote, task in zip(votes, scores.tasks, strict=True) if task == one]
            )
            for one in sorted(set(scores.tasks))
        ]
        # Shares are compared as quotients: 0.55 * 20 is more than 11 in floating point.
        return [
            (layer, head)
            for layer, head in best_heads(overall, sum(map(len, overall)))
            if overall[layer][head] >= self.sample_consensus
            and sum(matrix[layer][head] > 0.5 for matrix in by_task) / len(by_task)
            >= self.task_consensus
        ]

    def _share(self, shape: ModelShape) -> float:
        return self.candidate_share or default_candidate_share(shape)

    def _votes(self, scores: HeadScores, shape: ModelShape) -> list[Matrix]:
        """Return per sample 1.0 for each candidate."""
        return [candidates(matrix, self._share(shape)) for matrix in scores.per_sample]


def default_candidate_share(shape: ModelShape) -> float:
    """The paper's p: 0.8 to 0.85 for multi-head attention, 0.6 to 0.7 for grouped queries."""
    return MHA_CANDIDATE_SHARE if shape.group_size == 1 else GQA_CANDIDATE_SHARE


def candidates(scores: Matrix, share: float) -> Matrix:
    """1.0 for the best `share` of each layer's heads (at least one), 0.0 for the others."""
    rows = []
    for row in scores:
        count = max(1, round(share * len(row)))
        best = {head for _, head in best_heads((row,), count)}
        rows.append(tuple(float(head in best) for head in range(len(row))))
    return tuple(rows)

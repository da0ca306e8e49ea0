"""RazorAttention: keep the heads that look back at copies, found without any data (section 3.3).

Random tokens are repeated; a head that attends to what followed a token's earlier copies is an
induction head, one that attends to the copies themselves an echo head.  Over all query heads of
all layers together, the best 14% by induction and the best 1% by echo are protected; a GQA group
is protected when any of its query heads is.

For another number of heads both shares grow or shrink together (the paper itself doubles them for
ultra-long contexts).  A head's admission is the factor at which they reach it:

    admission = min(rank by induction / heads the 14% are, rank by echo / heads the 1% are)

so the paper's rule is "admission <= 1", and a profile's score is 1 / admission: 1 or more is
protected by the paper's rule.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvtier.heads.methods.base import HeadMethod, HeadScores, best_heads, ranked
from kvtier.heads.model.config import context_length
from kvtier.heads.profile import Head, Matrix, ModelShape
from kvtier.heads.progress import Progress, no_progress

if TYPE_CHECKING:
    from kvtier.heads.probes.context import ProbeBatch
    from kvtier.heads.probes.copies import RepeatMasses


@dataclass(frozen=True, kw_only=True)
class RazorScores(HeadScores):
    """Scores with what they were made of. masses: per query head."""

    masses: RepeatMasses


@dataclass(frozen=True)
class Razor(HeadMethod):
    """Induction and echo heads.

    random_tokens:    K, as many as context and vocabulary allow
    repeats:          how often they are said
    induction_share:  of all query heads, protected for induction, in (0, 1]; at least one
    echo_share:       likewise for echo
    """

    name: ClassVar[str] = "razor"
    data_free: ClassVar[bool] = True
    has_own_rule: ClassVar[bool] = True
    takes_seed: ClassVar[bool] = True

    random_tokens: int = 2500
    repeats: int = 4
    induction_share: float = 0.14
    echo_share: float = 0.01
    seed: int = 0

    def score(self, batches: Sequence[ProbeBatch], progress: Progress = no_progress) -> RazorScores:
        """1 / admission per KV head; the samples are not looked at."""
        from kvtier.heads.probes.copies import plain_tokens, repeat_masses

        probe = batches[0].probe
        plain = plain_tokens(probe.model)
        longest = context_length(probe.model.config.get_text_config().to_dict())
        count = min(self.random_tokens, len(plain))
        count = min(count, longest // self.repeats) if longest else count
        base = random.Random(self.seed).sample(plain, count)
        masses = repeat_masses(probe.model, base, self.repeats, progress)
        mean = tuple(
            tuple(1 / admission for admission in row)
            for row in self.admissions(masses, probe.shape.group_size)
        )
        return RazorScores(mean=mean, masses=masses)

    def admissions(self, masses: RepeatMasses, group_size: int) -> Matrix:
        """Factor on both shares at which a KV head is first protected, `[layers][kv_heads]`."""
        total = sum(map(len, masses.echo))
        shares = ((masses.induction, self.induction_share), (masses.echo, self.echo_share))
        induction, echo = (
            _relative_ranks(scores, max(1, round(share * total))) for scores, share in shares
        )
        return tuple(
            _by_group(list(map(min, *rows)), group_size, min)
            for rows in zip(induction, echo, strict=True)
        )

    def ranking(self, scores: HeadScores, shape: ModelShape) -> list[Head]:
        """All heads, the first to be admitted first. Many groups share a rank when the shares are
        few heads: the mass decides between them."""
        assert isinstance(scores, RazorScores), "scores of another method"
        masses = scores.masses.induction
        induction = tuple(_by_group(row, shape.group_size, max) for row in masses)
        return ranked(scores.mean, induction)

    def default_selection(self, scores: HeadScores, shape: ModelShape) -> list[Head]:
        """The paper's heads."""
        order = self.ranking(scores, shape)
        return [(layer, head) for layer, head in order if scores.mean[layer][head] >= 1]


def _relative_ranks(scores: Matrix, protected: int) -> list[list[float]]:
    """Rank of every head over all layers, 1 the best, divided by how many are protected."""
    order = best_heads(scores, sum(map(len, scores)))
    ranks = {head: rank / protected for rank, head in enumerate(order, start=1)}
    return [[ranks[layer, head] for head in range(len(row))] for layer, row in enumerate(scores)]


def _by_group(
    row: Sequence[float], group_size: int, of: Callable[[Sequence[float]], float]
) -> tuple[float, ...]:
    """One number per KV head of what its query heads have."""
    return tuple(of(row[i : i + group_size]) for i in range(0, len(row), group_size))

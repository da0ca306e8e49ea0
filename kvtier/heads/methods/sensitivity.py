"""Sensitivity: keep the heads whose context is missed when it is gone.

Attention mass can be fooled by diffuse heads that need nothing.  This method asks the model: drop
one head's context, measure the answers, take the head that is missed least, and go on without it
(greedy backward elimination).  Queries and context KV are reused, see
`kvtier.heads.probes.context`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.errors import UsageError
from kvtier.heads.methods.base import HeadMethod, HeadScores, MethodOption, Selection, Target
from kvtier.heads.methods.ranking import allowed_loss, heads_by_layer
from kvtier.heads.probes.quality import Kept, Quality, kept_heads, measure
from kvtier.heads.profile import Head, ModelShape
from kvtier.heads.progress import Progress, no_progress

if TYPE_CHECKING:
    from kvtier.heads.probes.context import ProbeBatch

ROUND_SHARE = 16


class Sensitivity(HeadMethod):
    """Greedy backward elimination by answer loss.

    round_share: every round drops 1/round_share of the heads that remain, at least one, so that
        models with hundreds of heads take tens of rounds instead of hundreds
    """

    name = "sensitivity"
    by_head = True
    options = (
        MethodOption(
            "round_share", int, "N",
            f"drop one of N of the remaining heads per round (default: {ROUND_SHARE})",
        ),
    )  # fmt: skip

    def __init__(self, round_share: int = ROUND_SHARE) -> None:
        if round_share < 1:
            raise UsageError("round_share", "at least 1", round_share)
        self.round_share = round_share

    def score(self, batches: Sequence[ProbeBatch], progress: Progress = no_progress) -> HeadScores:
        """Rise of the answer loss in nats when one head alone drops its context."""
        shape = batches[0].shape
        full = measure(batches, batches[0].probe.full()).loss
        rises = _losses_without(batches, all_heads(shape), progress, "one head dropped")
        rows = [
            tuple(rises[layer, head].loss - full for head in range(shape.num_kv_heads))
            for layer in range(shape.num_layers)
        ]
        return HeadScores(mean=tuple(rows))

    def select(
        self,
        scores: HeadScores,
        batches: Sequence[ProbeBatch],
        target: Target,
        progress: Progress = no_progress,
    ) -> Selection:
        """Eliminate down to the share, or until the next drop would break the budget."""
        shape = batches[0].shape
        most = None if target.budget is None else allowed_loss(batches, target.budget)
        least = target.num_heads(shape)
        heads, path, dropped = all_heads(shape), [], list[Head]()
        while len(heads) > least:
            drops = min(max(1, len(heads) // self.round_share), len(heads) - least)
            stage = f"elimination, {len(heads)} heads left"
            trials = _losses_without(batches, heads, progress, stage)
            missed_least = sorted(heads, key=lambda head: (trials[head].loss, head))
            rest = [head for head in heads if head not in missed_least[:drops]]
            quality = trials[missed_least[0]] if drops == 1 else measure(batches, mask(rest, shape))
            if most is not None and quality.loss > most:
                if drops == 1:
                    break
                # Several heads at once were too many: finish one by one.
                rest, quality = [h for h in heads if h != missed_least[0]], trials[missed_least[0]]
                if quality.loss > most:
                    break
            dropped += [head for head in missed_least if head in heads and head not in rest]
            heads = rest
            path.append({"heads": len(heads), "recall": quality.recall, "loss": quality.loss})
        parameters = {"round_share": self.round_share, "elimination": path}
        # What is left was not compared with each other: it goes by what each is worth alone.
        left = sorted(heads, key=lambda at: (-scores.mean[at[0]][at[1]], at))
        order = (*left, *reversed(dropped))
        return Selection(heads_by_layer(heads, shape.num_layers), scores.mean, parameters, order)


def all_heads(shape: ModelShape) -> list[Head]:
    """Every head, by layer."""
    layers, heads = range(shape.num_layers), range(shape.num_kv_heads)
    return [(layer, head) for layer in layers for head in heads]


def mask(heads: Sequence[Head], shape: ModelShape) -> Kept:
    """The probe's mask that keeps exactly `heads`."""
    return kept_heads(heads_by_layer(heads, shape.num_layers), shape)


def _losses_without(
    batches: Sequence[ProbeBatch], heads: Sequence[Head], progress: Progress, stage: str
) -> dict[Head, Quality]:
    """Quality with each of `heads` dropped in turn, all the others of them kept."""
    shape = batches[0].shape
    found = {}
    for done, dropped in enumerate(heads):
        progress(stage, done, len(heads))
        rest = [head for head in heads if head != dropped]
        found[dropped] = measure(batches, mask(rest, shape))
    progress(stage, len(heads), len(heads))
    return found

"""Measuring what a kept share costs: the triples (NLL, retention, quality) behind a curve.

Per context: prefill once, score it as the engine would (`kvtier.heads.reference.compaction`), then
ask its questions again for every retention.

    equal budgets      CA heads of a profile keep their own best. The reference is the same profile
                       with r = 1: a curve says what compaction costs on top of the head split,
                       whose own cost the profile carries
    adaptive budgets   heads compete for entries. The reference is the whole KV

    quality g = (NLL of the answers at r = 1 + floor) / (NLL of the answers at r + floor)

The floor keeps g meaningful for a model that recalls perfectly, whose NLL is nearly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtier.calibration.curves import Measurement
from kvtier.heads.model.config import shape_of
from kvtier.heads.probes.held import Asker, selected
from kvtier.heads.profile import HeadProfile, full_profile
from kvtier.heads.progress import Progress, each, no_progress
from kvtier.heads.reference.compaction import NLL_STRIDE, ScoredSession
from kvtier.heads.samples.questions import CalibrationSample, middle_of
from kvtier.retention.head_budgets import adaptive_selection
from kvtier.retention.locality import DroppedSpan, LocalityRule
from kvtier.retention.scorers import TokenScorer
from kvtier.retention.shares.base import share_of

RETENTIONS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
ANSWER_FLOOR_NATS = 0.1


@dataclass(frozen=True)
class RankedContext:
    """A prefilled context whose heads' middle tokens are ranked.

    kv:       per layer exact keys and values, `[kv_heads, tokens, dim]` each
    worth:    float32 `[layers, kv_heads, middle]`, higher = keep
    anchored: bool `[layers, kv_heads]`, heads that keep as many tokens each; the others keep one
              entry for all, or nothing where it `compensates` not. None: all heads compete
    """

    asker: Asker
    kv: list[tuple[Tensor, Tensor]]
    worth: Tensor
    span: DroppedSpan
    group: int
    nll: float
    anchored: Tensor | None = None
    compensates: bool = True

    @property
    def middle_tokens(self) -> int:
        return self.span.num_tokens

    def loss(self, keep: int) -> float:
        """Nats per answer token when heads hold `keep` tokens of the middle: each of those that are
        anchored, or all that compete on average."""
        shape = (*self.worth.shape[:2], self.kv[0][0].shape[1])
        kept = torch.ones(shape, dtype=torch.bool, device=self.worth.device)
        kept[..., self.span.begin : self.span.end] = self._best(keep)
        summed = None
        if self.anchored is not None and self.compensates:
            summed = ~self.anchored
        return self.asker.quality(selected(self.kv, kept, self.group, summed)).loss

    def _best(self, keep: int) -> Tensor:
        """Tokens of the middle that each head keeps, bool of the shape of `worth`."""
        if self.anchored is None:
            return adaptive_selection(self.worth.flatten(0, 1), keep).view(self.worth.shape)
        best = torch.zeros_like(self.worth, dtype=torch.bool)
        best.scatter_(-1, self.worth.topk(keep, dim=-1).indices, True)
        return best & self.anchored[..., None]


@dataclass(frozen=True)
class Budgets:
    """The rule by which heads share the entries that are kept.

    scorer:   of tokens; a `comparable` one where heads compete
    profile:  equal budgets for its CA heads; None: all heads compete
    kv_dtype: what the context's KV is rounded to, as in ReferenceSession
    """

    model: Any
    rule: LocalityRule
    scorer: TokenScorer
    profile: HeadProfile | None = None
    nll_stride: int = NLL_STRIDE
    kv_dtype: torch.dtype | None = None

    def __call__(self, sample: CalibrationSample) -> RankedContext:
        """Prefill and rank a sample's context. Raises SizeError when it has no middle."""
        span, shape = middle_of(len(sample.context_ids), self.rule), shape_of(self.model)
        profile = self.profile or full_profile(shape)
        session = ScoredSession(
            self.model,
            full_profile(shape),
            self.rule,
            scorer=self.scorer,
            nll_stride=self.nll_stride,
            kv_dtype=self.kv_dtype,
        )
        session.turn(sample.context_ids, 0)
        kv = [session.exact_kv(layer) for layer in range(shape.num_layers)]
        worth = kv[0][0].new_zeros(
            shape.num_layers, shape.num_kv_heads, span.num_tokens, dtype=torch.float32
        )
        anchored = torch.zeros(worth.shape[:2], dtype=torch.bool, device=worth.device)
        for layer, heads in enumerate(map(list, profile.ca_heads)):
            anchored[layer, heads] = True
            if heads:
                keys, values = (x[heads, span.begin : span.end] for x in kv[layer])
                worth[layer, heads] = session.scores(layer, heads, keys, values, span.begin)
        return RankedContext(
            asker=Asker(self.model, sample),
            kv=kv,
            worth=worth,
            span=span,
            group=shape.group_size,
            nll=session.mean_nll(),
            anchored=None if self.profile is None else anchored,
            compensates=self.rule.compensation,
        )


def kept_tokens(retention: float, middle_tokens: int) -> int:
    """A share of the middle, in whole tokens and at least one; never undercut by rounding."""
    return min(max(share_of(retention, middle_tokens), 1), middle_tokens)


def measure_curve(
    prepare: Budgets, samples: Sequence[CalibrationSample], progress: Progress = no_progress
) -> list[Measurement]:
    """Every sample at every one of RETENTIONS; one context at a time is held."""
    found = []
    for index, sample in enumerate(each(samples, "measuring kept shares", progress)):
        found += _measure(prepare(sample), sample.task, index)
    return found


@torch.inference_mode()
def _measure(context: RankedContext, task: str, index: int) -> list[Measurement]:
    middle = context.middle_tokens
    full = context.loss(middle)
    return [
        Measurement(
            nll=context.nll,
            retention=keep / middle,
            ratio=(full + ANSWER_FLOOR_NATS) / (context.loss(keep) + ANSWER_FLOOR_NATS),
            context=index,
            task=task,
        )
        for keep in sorted({kept_tokens(retention, middle) for retention in RETENTIONS})
    ]

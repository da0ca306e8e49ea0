"""Measuring what a kept share costs: the triples (NLL, retention, quality) behind a curve.

Per context: prefill once, score it as the engine would (`kvtier.heads.reference.compaction`), then
ask its questions again for every retention.

    equal budgets      CA heads of a profile keep their own best (`EqualBudgets`). The reference is
                       the same profile with r = 1: a curve says what compaction costs on top of the
                       head split, whose own cost the profile carries
    adaptive budgets   heads compete for entries (`AdaptiveBudgets`). The reference is the whole KV

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
from kvtier.errors import UsageError
from kvtier.heads.model.config import shape_of
from kvtier.heads.probes.context import HeadProbe, LayerParts, ProbeBatch
from kvtier.heads.probes.held import Asker, selected
from kvtier.heads.profile import HeadProfile, full_profile
from kvtier.heads.progress import Progress, no_progress
from kvtier.heads.reference.attention import Block
from kvtier.heads.reference.compaction import NLL_STRIDE, ScoredSession, gather_tokens
from kvtier.heads.samples.questions import CalibrationSample, middle_of
from kvtier.retention.head_budgets import adaptive_selection
from kvtier.retention.locality import DroppedSpan, LocalityRule
from kvtier.retention.scorers import TokenScorer
from kvtier.retention.shares.base import share_of

RETENTIONS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
ANSWER_FLOOR_NATS = 0.1


@dataclass(frozen=True)
class ScoredContext:
    """A prefilled context whose CA heads' middle tokens are ranked.

    order: per layer int64 `[ca_heads, middle]`, offsets in the middle, best first; None without CA
           heads
    nll:   of the context, nats per token
    """

    batch: ProbeBatch
    profile: HeadProfile
    order: tuple[Tensor | None, ...]
    nll: float

    @property
    def middle_tokens(self) -> int:
        return middle_of(self.batch.context_tokens, self.batch.probe.rule).num_tokens

    def loss(self, keep: int) -> float:
        """Nats per answer token when CA heads hold `keep` tokens of the middle each."""
        return self.at(keep).quality(self.batch.probe.mask(self.profile)).loss

    def at(self, keep: int) -> ProbeBatch:
        """The same questions when CA heads hold `keep` tokens of the middle."""
        batch = self.batch
        if keep == self.middle_tokens:
            return batch
        layers = []
        for parts, order, heads in zip(
            batch.layers, self.order, self.profile.ca_heads, strict=True
        ):
            layers.append(parts if order is None else _compacted(parts, order, heads, keep))
        return ProbeBatch(batch.probe, batch.sample, layers, batch.ids, batch.targets)


def _compacted(parts: LayerParts, order: Tensor, heads: Sequence[int], keep: int) -> LayerParts:
    """A layer whose CA heads hold their best `keep` tokens of the middle."""
    assert parts.middle is not None, "a context without a middle"
    chosen = order[:, :keep].sort(dim=-1).values
    sides = []
    for side in (parts.middle.k, parts.middle.v):
        held = side[:, :keep].clone()  # locality heads are never asked for their middle
        held[list(heads)] = gather_tokens(side[list(heads)], chosen)
        sides.append(held)
    return parts._replace(middle=Block(sides[0], sides[1]))


@dataclass(frozen=True)
class EqualBudgets:
    """CA heads of a profile keep as many tokens each, their own best. kv_dtype: what the context's
    KV is rounded to, as in ReferenceSession."""

    probe: HeadProbe
    profile: HeadProfile
    scorer: TokenScorer
    nll_stride: int = NLL_STRIDE
    kv_dtype: torch.dtype | None = None

    def __call__(self, sample: CalibrationSample) -> ScoredContext:
        """Prefill and rank a sample's context. Raises SizeError when it has no middle."""
        probe = self.probe
        span = middle_of(len(sample.context_ids), probe.rule)
        session = _prefilled(
            probe.model, probe.rule, sample, self.scorer, self.nll_stride, self.kv_dtype
        )
        order: list[Tensor | None] = []
        for layer, heads in enumerate(self.profile.ca_heads):
            if not heads:
                order.append(None)
                continue
            scores = _scores(session, layer, heads, span)
            order.append(scores.argsort(dim=-1, descending=True))
        nll = session.mean_nll()
        return ScoredContext(probe.batch_of(sample, session), self.profile, tuple(order), nll)


@dataclass(frozen=True)
class RankedContext:
    """A prefilled context all of whose heads' middle tokens are ranked together.

    kv:    per layer exact keys and values, `[kv_heads, tokens, dim]` each
    worth: float32 `[layers, kv_heads, middle]`, higher = keep
    """

    asker: Asker
    kv: list[tuple[Tensor, Tensor]]
    worth: Tensor
    span: DroppedSpan
    group: int
    nll: float

    @property
    def middle_tokens(self) -> int:
        return self.span.num_tokens

    def loss(self, keep: int) -> float:
        """Nats per answer token when heads hold `keep` tokens of the middle on average."""
        shape = (*self.worth.shape[:2], self.kv[0][0].shape[1])
        kept = torch.ones(shape, dtype=torch.bool, device=self.worth.device)
        best = adaptive_selection(self.worth.flatten(0, 1), keep)
        kept[..., self.span.begin : self.span.end] = best.view(self.worth.shape)
        return self.asker.quality(selected(self.kv, kept, self.group)).loss


@dataclass(frozen=True)
class AdaptiveBudgets:
    """All heads compete for entries; scorer: a `comparable` one; kv_dtype: see EqualBudgets."""

    model: Any
    rule: LocalityRule
    scorer: TokenScorer
    nll_stride: int = NLL_STRIDE
    kv_dtype: torch.dtype | None = None

    def __call__(self, sample: CalibrationSample) -> RankedContext:
        """Prefill and rank a sample's context. Raises SizeError when it has no middle."""
        span = middle_of(len(sample.context_ids), self.rule)
        session = _prefilled(
            self.model, self.rule, sample, self.scorer, self.nll_stride, self.kv_dtype
        )
        shape = shape_of(self.model)
        layers, heads = range(shape.num_layers), range(shape.num_kv_heads)
        return RankedContext(
            asker=Asker(self.model, sample),
            kv=[session.exact_kv(layer) for layer in layers],
            worth=torch.stack([_scores(session, layer, heads, span) for layer in layers]),
            span=span,
            group=shape.group_size,
            nll=session.mean_nll(),
        )


def _prefilled(
    model: Any,
    rule: LocalityRule,
    sample: CalibrationSample,
    scorer: TokenScorer,
    nll_stride: int,
    kv_dtype: torch.dtype | None,
) -> ScoredSession:
    """A session whose one turn is the sample's context, every head CA."""
    profile = full_profile(shape_of(model))
    session = ScoredSession(
        model, profile, rule, scorer=scorer, nll_stride=nll_stride, kv_dtype=kv_dtype
    )
    session.turn(sample.context_ids, 0)
    return session


def _scores(session: ScoredSession, layer: int, heads: Sequence[int], span: DroppedSpan) -> Tensor:
    """Float32 `[heads, middle]` of some heads of a layer."""
    keys, values = (x[list(heads), span.begin : span.end] for x in session.exact_kv(layer))
    return session.scores(layer, heads, keys, values, span.begin)


def kept_tokens(retention: float, middle_tokens: int) -> int:
    """A share of the middle, in whole tokens and at least one; never undercut by rounding."""
    return min(max(share_of(retention, middle_tokens), 1), middle_tokens)


def measure_curve(
    prepare: EqualBudgets | AdaptiveBudgets,
    samples: Sequence[CalibrationSample],
    *,
    retentions: Sequence[float] = RETENTIONS,
    floor_nats: float = ANSWER_FLOOR_NATS,
    progress: Progress = no_progress,
) -> list[Measurement]:
    """Every sample at every retention; one context at a time is held.

    Raises UsageError for a retention outside (0, 1] or a floor that is not positive.
    """
    if not retentions or any(not 0 < r <= 1 for r in retentions):
        raise UsageError("retentions", "numbers in (0, 1]", list(retentions))
    if not floor_nats > 0:
        raise UsageError("floor_nats", "more than 0 nats", floor_nats)
    found = []
    for index, sample in enumerate(samples):
        progress("measuring kept shares", index, len(samples))
        found += _measure(prepare(sample), sample.task, retentions, floor_nats, index)
    progress("measuring kept shares", len(samples), len(samples))
    return found


@torch.inference_mode()
def _measure(
    context: ScoredContext | RankedContext,
    task: str,
    retentions: Sequence[float],
    floor_nats: float,
    index: int,
) -> list[Measurement]:
    middle = context.middle_tokens
    full = context.loss(middle)
    return [
        Measurement(
            nll=context.nll,
            retention=keep / middle,
            ratio=(full + floor_nats) / (context.loss(keep) + floor_nats),
            context=index,
            task=task,
        )
        for keep in sorted({kept_tokens(r, middle) for r in retentions})
    ]

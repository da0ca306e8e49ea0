"""Measuring what a kept share costs: the triples (NLL, retention, quality) behind a curve.

Per context: prefill once, score it as the engine would (`kvtier.heads.reference.compaction`), then
ask its questions again for every retention. The reference is the same head profile with r = 1, so a
curve says what compaction costs on top of the head split, whose own cost the profile carries.

    quality g = (NLL of the answers at r = 1 + floor) / (NLL of the answers at r + floor)

The floor keeps g meaningful for a model that recalls perfectly, whose NLL is nearly 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier.calibration.curves import Measurement
from kvtier.errors import UsageError
from kvtier.heads.probes.context import HeadProbe, LayerParts, ProbeBatch
from kvtier.heads.probes.quality import Kept
from kvtier.heads.profile import HeadProfile, full_profile
from kvtier.heads.progress import Progress, no_progress
from kvtier.heads.reference.attention import Block
from kvtier.heads.reference.compaction import NLL_STRIDE, ScoredSession, gather_tokens
from kvtier.heads.samples.questions import CalibrationSample, middle_of
from kvtier.retention.scorers import TokenScorer

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
    order: tuple[Tensor | None, ...]
    nll: float

    @property
    def middle_tokens(self) -> int:
        return middle_of(self.batch.context_tokens, self.batch.probe.rule).num_tokens

    def kept_tokens(self, retention: float) -> int:
        """A share of the middle, in whole tokens and at least one; never undercut by rounding."""
        wanted = math.ceil(retention * self.middle_tokens - 1e-9)
        return min(max(wanted, 1), self.middle_tokens)

    def at(self, keep: int, profile: HeadProfile) -> ProbeBatch:
        """The same questions when CA heads hold `keep` tokens of the middle."""
        layers = []
        for parts, order, heads in zip(
            self.batch.layers, self.order, profile.ca_heads, strict=True
        ):
            layers.append(parts if order is None else _compacted(parts, order, heads, keep))
        batch = self.batch
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


class ScoredProbe(HeadProbe):
    """A head probe that also ranks a context's tokens; see `HeadProbe` for ownership."""

    def score(
        self,
        sample: CalibrationSample,
        profile: HeadProfile,
        scorer: TokenScorer,
        nll_stride: int,
    ) -> ScoredContext:
        """Prefill and rank a sample's context. Raises SizeError when it has no middle."""
        span = middle_of(len(sample.context_ids), self.rule)
        session = ScoredSession(
            self.model,
            full_profile(self.shape),
            self.rule,
            self.chunk_tokens,
            scorer,
            nll_stride,
        )
        session.turn(sample.context_ids, 0)
        order: list[Tensor | None] = []
        for layer, heads in enumerate(profile.ca_heads):
            if not heads:
                order.append(None)
                continue
            kv = session.exact_kv(layer)
            keys, values = (x[list(heads), span.begin : span.end] for x in kv)
            scores = session.scores(layer, heads, keys, values, span.begin)
            order.append(scores.argsort(dim=-1, descending=True))
        nll = session.mean_nll()
        return ScoredContext(self.batch_of(sample, session), tuple(order), nll)


def measure_curve(
    probe: ScoredProbe,
    profile: HeadProfile,
    samples: Sequence[CalibrationSample],
    scorer: TokenScorer,
    *,
    retentions: Sequence[float] = RETENTIONS,
    floor_nats: float = ANSWER_FLOOR_NATS,
    nll_stride: int = NLL_STRIDE,
    progress: Progress = no_progress,
) -> list[Measurement]:
    """Every sample at every retention; one context at a time is held.

    Raises UsageError for a retention outside (0, 1] or a floor that is not positive.
    """
    if not retentions or any(not 0 < r <= 1 for r in retentions):
        raise UsageError("retentions", "numbers in (0, 1]", list(retentions))
    if not floor_nats > 0:
        raise UsageError("floor_nats", "more than 0 nats", floor_nats)
    kept = probe.mask(profile)
    found = []
    for index, sample in enumerate(samples):
        progress("measuring kept shares", index, len(samples))
        context = probe.score(sample, profile, scorer, nll_stride)
        found += _measure(context, profile, kept, retentions, floor_nats, index)
    progress("measuring kept shares", len(samples), len(samples))
    return found


@torch.inference_mode()
def _measure(
    context: ScoredContext,
    profile: HeadProfile,
    kept: Kept,
    retentions: Sequence[float],
    floor_nats: float,
    index: int,
) -> list[Measurement]:
    full = context.batch.quality(kept).loss
    found = []
    for keep in sorted({context.kept_tokens(r) for r in retentions}):
        loss = context.at(keep, profile).quality(kept).loss
        found.append(
            Measurement(
                nll=context.nll,
                retention=keep / context.middle_tokens,
                ratio=(full + floor_nats) / (loss + floor_nats),
                context=index,
                task=context.batch.sample.task,
            )
        )
    return found

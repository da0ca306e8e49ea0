"""Asking questions about a context while chosen KV heads cannot see its middle.

The context's KV is computed once, exactly, in chunks.  Only the questions and their answers are run
again for every choice of heads, all questions of a context in one row:

    context, shared       | sink |        middle        | recent |
    kept head             | #### | #################### | ###### |  + question + answer
    dropped head          | #### | one entry, N votes   | ###### |  + question + answer

The middle is what `LocalityRule.dropped` drops of a first turn that is the context alone.  Answers
are teacher-forced: an answer whose every token is the argmax is the one greedy decoding writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtier.heads.model.config import shape_of
from kvtier.heads.probes.held import Asker, Held, held_of
from kvtier.heads.probes.quality import Kept, Quality, kept_heads
from kvtier.heads.probes.watching import LayerKV, ask
from kvtier.heads.profile import HeadProfile, Matrix, ModelShape, full_profile
from kvtier.heads.reference.session import DEFAULT_RULE, ReferenceSession
from kvtier.heads.samples.questions import CalibrationSample, middle_of
from kvtier.retention.locality import DroppedSpan, LocalityRule


@dataclass(frozen=True)
class ProbeBatch:
    """One sample, its context prefilled; made by `HeadProbe.prepare`.

    kv: per layer the context's exact keys and values; middle: offsets of what heads may drop
    """

    probe: HeadProbe
    sample: CalibrationSample
    kv: list[LayerKV]
    middle: DroppedSpan
    asker: Asker

    @property
    def shape(self) -> ModelShape:
        return self.probe.shape

    @property
    def context_tokens(self) -> int:
        return len(self.sample.context_ids)

    def held(self, layer: int, kept: Sequence[bool]) -> Held:
        """The entries that the heads of a layer hold when only the `kept` ones see the middle."""
        k, v = self.kv[layer]
        whole = torch.tensor(kept, device=k.device)
        stays = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
        stays[:, self.middle.begin : self.middle.end] = whole[:, None]
        summed = ~whole if self.probe.rule.compensation else None
        return held_of(k, v, stays, self.shape.group_size, summed)

    def quality(self, kept: Kept) -> Quality:
        """Return how well the questions are answered when only the `kept` heads see the middle."""
        return self.asker.quality(lambda layer: self.held(layer, kept[layer]))

    def middle_mass(self, prefill_rows: int, decode_steps: int) -> Matrix:
        """ContextKeeper's equation 1 for every KV head: attention mass on the middle, averaged over
        the last `prefill_rows` rows of each question and the first `decode_steps` answer rows, then
        over the group's query heads. `[layers][kv_heads]` in [0, 1], higher = prefers the context.
        """
        row, shape = self.asker.row, self.shape
        counts = torch.zeros(len(row.ids), dtype=torch.bool, device=row.ids.device)
        for span, prompt in zip(row.spans, row.prompts, strict=True):
            stop = span.start + prompt
            first = max(span.start, stop - prefill_rows)
            counts[first : min(stop + decode_steps, span.stop)] = True
        found = torch.zeros(shape.num_layers, shape.num_kv_heads, dtype=torch.float64)

        def watch(layer: int, head: int, asking: slice, weights: Tensor) -> None:
            mass = weights[..., self.middle.begin : self.middle.end].sum(-1)
            found[layer, head] += float(mass[:, counts[asking]].double().sum())

        ask(self.probe.model, self.kv, self.sample.questions, watch)
        rows = int(counts.sum()) * shape.group_size
        return tuple(map(tuple, (found / rows).tolist()))


class HeadProbe:
    """A causal LM whose KV heads can be made to drop the middle of a context.

    Borrows the model and changes it only while a method runs; not for several threads.
    """

    def __init__(self, model: Any, rule: LocalityRule = DEFAULT_RULE) -> None:
        """Raises UnsupportedModelError when the model's heads cannot be split."""
        self.model = model
        self.rule = rule
        self.shape = shape_of(model)

    def full(self) -> Kept:
        """Every head kept."""
        return ((True,) * self.shape.num_kv_heads,) * self.shape.num_layers

    def mask(self, profile: HeadProfile) -> Kept:
        """The kept heads of a profile. Raises HeadProfileMismatchError when it does not fit."""
        profile.check_fits(self.shape)
        return kept_heads(profile.ca_heads, self.shape)

    def prepare(self, sample: CalibrationSample) -> ProbeBatch:
        """Prefill a sample's context. Raises SizeError when it has no middle to drop."""
        middle = middle_of(len(sample.context_ids), self.rule)
        session = ReferenceSession(self.model, full_profile(self.shape), self.rule)
        session.turn(sample.context_ids, 0)
        kv = [session.exact_kv(layer) for layer in range(self.shape.num_layers)]
        return ProbeBatch(self, sample, kv, middle, Asker(self.model, sample))

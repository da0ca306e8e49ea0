"""Asking questions about a context while chosen KV heads cannot see its middle.

The context's KV is computed once, exactly, in chunks.  Only the questions and their answers are run
again for every choice of heads, all questions of a context in one batch:

    context, shared       | sink |        middle        | recent |
    kept head             | #### | #################### | ###### |  + question + answer
    dropped head          | #### | one entry, N votes   | ###### |  + question + answer

The middle is what `LocalityRule.dropped` drops of a first turn that is the context alone.  Answers
are teacher-forced: an answer whose every token is the argmax is the one greedy decoding writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvtier.heads.model.config import shape_of
from kvtier.heads.probes.quality import Kept, Quality, kept_heads
from kvtier.heads.profile import HeadProfile, Matrix, ModelShape, full_profile
from kvtier.heads.reference.attention import (
    AttentionState,
    Block,
    attend,
    attend_own,
    attending,
    mean_entry,
)
from kvtier.heads.reference.session import CHUNK_TOKENS, DEFAULT_RULE, ReferenceSession
from kvtier.heads.samples.questions import CalibrationSample, Question, middle_of
from kvtier.retention.locality import LocalityRule

MEMO_BYTES = 256 << 20
IGNORE = -100

Watch = Callable[[int, Tensor], None]
"""A callback per layer with the attention mass on the middle, `[heads, questions, tokens]`."""


class LayerParts(NamedTuple):
    """A layer's context KV in three blocks, `[kv_heads, n, dim]`; middle and entry may be None."""

    edges: Block
    middle: Block | None
    entry: Block | None

    def block(self, name: str, head: int) -> Block | None:
        """One head of one part, as a view."""
        part: Block | None = getattr(self, name)
        if part is None:
            return None
        return Block(part.k[head : head + 1], part.v[head : head + 1], part.log_votes)


@dataclass
class ProbeBatch:
    """One sample, its context prefilled and its questions padded; made by `HeadProbe.prepare`.

    ids, targets:  int64 `[questions, tokens]`; `targets[i, t]` is the answer token that follows
                   `ids[i, t]`, IGNORE where none is scored
    """

    probe: HeadProbe
    sample: CalibrationSample
    layers: list[LayerParts]
    ids: Tensor
    targets: Tensor
    _memo: dict[tuple[object, ...], AttentionState] = field(default_factory=dict)
    _memo_bytes: int = 0

    @property
    def shape(self) -> ModelShape:
        return self.probe.shape

    @property
    def context_tokens(self) -> int:
        return len(self.sample.context_ids)

    @torch.inference_mode()
    def logits(
        self, kept: Kept, watch: Watch | None = None, columns: Tensor | None = None
    ) -> Tensor:
        """Float32 `[questions, tokens, vocab]` when only the `kept` heads see the middle.

        columns: int64 `[n]`, the tokens wanted; None for all
        """

        def attend_layer(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            return self._attend(kept, watch, layer, q, k, v, scale)

        start = self.context_tokens
        positions = torch.arange(start, start + self.ids.shape[1], device=self.ids.device)
        positions = positions.expand(self.ids.shape)
        with attending(self.probe.model, attend_layer):
            output = self.probe.model(
                self.ids, position_ids=positions, use_cache=False,
                logits_to_keep=0 if columns is None else columns,
            )  # fmt: skip
        return output.logits.float()

    def quality(self, kept: Kept) -> Quality:
        """Return how well the questions are answered when only the `kept` heads see the middle."""
        # A large vocabulary's logits cost as much as many layers: only those of answers are made.
        columns = (self.targets != IGNORE).any(0).nonzero().squeeze(1)
        logits, targets = self.logits(kept, columns=columns), self.targets[:, columns]
        scored = targets != IGNORE
        right = (logits.argmax(-1) == targets) | ~scored
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE
        )
        return Quality(
            recall=float(right.all(1).float().mean()),
            tokens=float(right[scored].float().mean()),
            loss=float(loss),
        )

    def middle_mass(self, prefill_rows: int, decode_steps: int) -> Matrix:
        """ContextKeeper's equation 1 for every KV head: attention mass on the middle, averaged over
        the last `prefill_rows` rows of each question and the first `decode_steps` answer rows, then
        over the group's query heads. `[layers][kv_heads]` in [0, 1], higher = prefers the context.
        """
        rows = torch.zeros(self.ids.shape, dtype=torch.bool, device=self.ids.device)
        for index, question in enumerate(self.sample.questions):
            stop = len(question.prompt_ids)
            steps = min(decode_steps, len(question.answer_ids) - 1)
            rows[index, max(0, stop - prefill_rows) : stop + steps] = True
        found: list[tuple[float, ...]] = []

        def watch(layer: int, mass: Tensor) -> None:
            per_head = mass[:, rows].float().mean(1)
            per_group = per_head.view(self.shape.num_kv_heads, -1).mean(1)
            found.append(tuple(float(x) for x in per_group))

        self.logits(self.probe.full(), watch)
        return tuple(found)

    def _attend(
        self, kept: Kept, watch: Watch | None, layer: int, q: Tensor, k: Tensor, v: Tensor,
        scale: float,
    ) -> Tensor:  # fmt: skip
        """q `[questions, heads, tokens, dim]` over the context and each question over itself."""
        questions, num_heads, tokens, dim = q.shape
        kv_heads = k.shape[1]
        grouped = q.view(questions, kv_heads, -1, tokens, dim)
        own = attend_own(grouped.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), scale)
        own_out = own.out.view(grouped.shape)
        own_lse = own.lse.view(grouped.shape[:-1])
        out, mass = torch.empty_like(grouped), torch.zeros_like(own_lse)
        for head in range(kv_heads):
            rows = grouped[:, head].reshape(1, -1, dim)
            state = AttentionState(
                own_out[:, head].reshape(rows.shape), own_lse[:, head].reshape(rows.shape[:2])
            )
            state = state.merge(self._context(kept, layer, head, "edges", rows, scale))
            if self.layers[layer].middle is not None:
                part = "middle" if kept[layer][head] else "entry"
                middle = self._context(kept, layer, head, part, rows, scale)
                state = state.merge(middle)
                mass[:, head] = torch.exp(middle.lse - state.lse).view(mass[:, head].shape)
            out[:, head] = state.out.view(out[:, head].shape)
        if watch is not None:
            watch(layer, mass.view(questions, num_heads, tokens).transpose(0, 1))
        return out.view(q.shape)

    def _context(
        self, kept: Kept, layer: int, head: int, part: str, rows: Tensor, scale: float
    ) -> AttentionState:
        """The rows' attention over one part of the context.

        Queries of a layer depend on the choice of heads in the layers below it alone, so the
        state is remembered under that choice: choices that agree there read the context once.
        """
        key = (layer, kept[:layer], head, part)
        if key in self._memo:
            return self._memo[key]
        block = self.layers[layer].block(part, head)
        if block is None:  # no compensation: a dropped middle is simply absent
            return AttentionState(torch.zeros_like(rows), torch.full_like(rows[..., 0], -torch.inf))
        state = attend(rows, block, scale)
        size = state.out.nbytes + state.lse.nbytes
        if self._memo_bytes + size > MEMO_BYTES:
            self.forget()
        self._memo[key] = state
        self._memo_bytes += size
        return state

    def forget(self) -> None:
        """Give back the remembered states."""
        self._memo.clear()
        self._memo_bytes = 0


class HeadProbe:
    """A causal LM whose KV heads can be made to drop the middle of a context.

    Borrows the model and changes it only while a method runs; not for several threads.
    """

    def __init__(
        self, model: Any, rule: LocalityRule = DEFAULT_RULE, chunk_tokens: int = CHUNK_TOKENS
    ) -> None:
        """Raises UnsupportedModelError when the model's heads cannot be split."""
        self.model = model
        self.rule = rule
        self.chunk_tokens = chunk_tokens
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
        span = middle_of(len(sample.context_ids), self.rule)
        session = ReferenceSession(
            self.model, full_profile(self.shape), self.rule, self.chunk_tokens
        )
        session.turn(sample.context_ids, 0)
        layers = [
            self._parts(*session.exact_kv(layer), span.begin, span.end)
            for layer in range(self.shape.num_layers)
        ]
        ids, targets = _pad(sample.questions)
        device = self.model.device
        return ProbeBatch(self, sample, layers, ids.to(device), targets.to(device))

    def _parts(self, k: Tensor, v: Tensor, begin: int, end: int) -> LayerParts:
        edge_k, edge_v = (torch.cat([t[:, :begin], t[:, end:]], dim=1) for t in (k, v))
        middle = Block(k[:, begin:end], v[:, begin:end])
        entry = mean_entry(middle.k, middle.v) if self.rule.compensation else None
        return LayerParts(Block(edge_k, edge_v), middle, entry)


def _pad(questions: Sequence[Question]) -> tuple[Tensor, Tensor]:
    """ids and targets of teacher-forced questions; padding comes last, where nothing sees it."""
    rows = [[*q.prompt_ids, *q.answer_ids] for q in questions]
    width = max(map(len, rows)) - 1
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    targets = torch.full((len(rows), width), IGNORE)
    for index, (question, row) in enumerate(zip(questions, rows, strict=True)):
        ids[index, : len(row) - 1] = torch.tensor(row[:-1])
        scored = len(question.prompt_ids) + question.unscored
        targets[index, scored - 1 : len(row) - 1] = torch.tensor(row[scored:])
    return ids, targets

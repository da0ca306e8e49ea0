"""Fit what a token will be worth to later turns: `kvtier calibrate tokens`.

    context ── prefill ──> exact KV ── repeat it, ask about it ──> attention drawn by every token
                              └──────── ridge regression ──────────────┘     of every KV head

Contexts of two lengths tell what a length changes. What comes of it is measured on contexts that it
was not fitted on, of the other half of the texts, by their repetition alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvtier.errors import SizeError, UsageError
from kvtier.heads.model.config import (
    context_length,
    full_layers,
    read_config,
    shape_of,
    weights_revision,
)
from kvtier.heads.model.loading import load_model
from kvtier.heads.model.support import check_supported
from kvtier.heads.probes.reconstruction import (
    question_attention,
    repeat_request,
    repetition_attention,
)
from kvtier.heads.probes.watching import LayerKV
from kvtier.heads.profile import full_profile
from kvtier.heads.progress import Progress, no_progress
from kvtier.heads.reference.rotation import rotation_of
from kvtier.heads.reference.session import ReferenceSession
from kvtier.heads.samples.questions import CalibrationSample
from kvtier.heads.samples.synthetic import (
    CALIBRATION,
    HELD_OUT,
    make_samples,
    speaks_recall,
    tasks_for,
)
from kvtier.retention.head_budgets import best_of_all
from kvtier.retention.token_worth import Fit, TokenWorth
from kvtier.synthetic.frame import frame_of
from kvtier.synthetic.tokenizer import Tokenizer
from kvtier_kernels.scores import Rotation

# Few long contexts tell what a length changes, and take the time.
DEFAULT_LENGTHS, SHORT_CONTEXTS, LONG_CONTEXTS = (1536, 4000), 8, 4
JUDGED_CONTEXTS = 1  # per length
JUDGED_SHARES = (0.25, 0.1)


@dataclass(frozen=True)
class TokenFit:
    """A fitted map, and how well it tells the best entries of contexts that it has not seen.

    agreement: by share of the entries, how many of the truly best are among the predicted best
    """

    worth: TokenWorth
    contexts: int
    tokens: int
    seconds: float
    agreement: dict[float, float]


class Repeated(NamedTuple):
    """A context's exact KV per layer, `[kv_heads, tokens, dim]` each, and the attention its tokens
    drew when it was repeated, `[layers, kv_heads, tokens]`. queries: the mean of q qᵀ over its
    queries, `[layers, kv_heads, dim, dim]`."""

    kv: list[LayerKV]
    drawn: Tensor
    queries: Tensor


class WatchedSession(ReferenceSession):
    """A session that adds up q qᵀ of its queries, float64 `[layers, kv_heads, dim, dim]`."""

    def __init__(self, model: Any) -> None:
        shape = shape_of(model)
        super().__init__(model, full_profile(shape))
        size = (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.head_dim)
        self.seen = torch.zeros(size, dtype=torch.float64, device=model.device)

    def _attend_layer(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        grouped = q[0].reshape(k.shape[1], -1, q.shape[-1]).float()
        self.seen[layer] += grouped.transpose(1, 2) @ grouped
        return super()._attend_layer(layer, q, k, v, scale)


def fit_tokens(
    model_path: str,
    *,
    tasks: Sequence[str] | None = None,
    contexts: int | None = None,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> TokenFit:
    """Fit on so many contexts per length, and judge.

    tasks: those of the contexts, which take turns through all lengths; None for all. contexts:
    per length; None for SHORT_CONTEXTS of the shortest and LONG_CONTEXTS of any other. lengths: in
    tokens; None for DEFAULT_LENGTHS, or shorter ones where the model reads less. Raises KvtierError
    for a model or a length that will not do.
    """
    if contexts is not None and contexts < 1:
        raise UsageError("--contexts", "at least 1", contexts)
    check_supported(read_config(model_path), windows=True)
    lengths = _lengths(model_path, lengths)
    usual = {min(lengths): SHORT_CONTEXTS}
    counts = [contexts or usual.get(length, LONG_CONTEXTS) for length in lengths]
    known = tasks_for(model_path)
    tasks = tasks or known.measuring
    fitted: list[CalibrationSample] = []
    for length, count in zip(lengths, counts, strict=True):
        # Each task comes once before one comes twice, where there are few contexts.
        turn = len(fitted) % len(tasks)
        dealt = [*tasks[turn:], *tasks[:turn]]
        fitted += make_samples(known.make, dealt, count, [length], seed, CALIBRATION)
    judged = make_samples(known.make, tasks, JUDGED_CONTEXTS, lengths, seed, HELD_OUT)
    began = time.monotonic()
    model = load_model(model_path)
    fit = Fit(shape_of(model).num_layers)
    tokens, queries = 0, torch.zeros(())
    repeated = _repetitions(model, model_path, fitted, progress)
    for sample, (kv, drawn, seen) in zip(fitted, repeated, strict=True):
        # The most that anything that was asked of the context drew.
        drawn = torch.maximum(drawn, question_attention(model, kv, sample.questions))
        for layer, k, v, rotation in _layers(model, kv):
            fit.add(layer, k, v, rotation, drawn[layer])
        tokens += drawn.shape[-1]
        queries = queries + seen
    revision = weights_revision(model_path) or ""
    worth = replace(fit.solve(), revision=revision, queries=_scaled(queries))
    seconds = time.monotonic() - began
    found = [
        {share: _agreement(worth, model, one, share) for share in JUDGED_SHARES}
        for one in _repetitions(model, model_path, judged, progress)
    ]
    agreement = {share: sum(one[share] for one in found) / len(found) for share in JUDGED_SHARES}
    return TokenFit(worth, len(fitted), tokens, seconds, agreement)


def _scaled(queries: Tensor) -> Tensor:
    """A sum of `queries`, each head's scaled so that its mean energy is 1, in the precision that a
    file has."""
    energy = queries.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-12)
    return (queries / energy[..., None, None]).half().float().cpu()


def _repetitions(
    model: Any, model_path: str, samples: Sequence[CalibrationSample], progress: Progress
) -> Iterator[Repeated]:
    """Each sample's context, prefilled and repeated; one at a time is held."""
    request = _request(model_path)
    shape = shape_of(model)
    for index, sample in enumerate(samples):
        progress(f"repeating, {sample.task}", index, len(samples))
        session = WatchedSession(model)
        session.turn(sample.context_ids, 0)
        kv = [session.exact_kv(layer) for layer in range(shape.num_layers)]
        drawn = repetition_attention(model, kv, sample.context_ids, request)
        yield Repeated(kv, drawn, session.seen / len(sample.context_ids))
    progress("repeating", len(samples), len(samples))


def _request(model_path: str) -> list[int]:
    """The tokens that ask for a repetition; none in the recall language."""
    if speaks_recall(model_path):
        return []
    tokenizer = Tokenizer(model_path)
    return repeat_request(tokenizer, frame_of(tokenizer))


def _lengths(model_path: str, asked: Sequence[int] | None) -> Sequence[int]:
    """Return the lengths asked for, or the default ones, shorter where the model reads less. Raises
    SizeError where it does not read a context and its repetition."""
    read = context_length(read_config(model_path)) or sys.maxsize
    most = (read - len(_request(model_path))) // 2
    if asked is None:
        return [min(one, one * most // max(DEFAULT_LENGTHS)) for one in DEFAULT_LENGTHS]
    if max(asked) > most:
        expected = f"at most {most} tokens: a context and its repetition"
        raise SizeError("--len", expected, max(asked))
    return asked


def _layers(
    model: Any, kv: Sequence[LayerKV]
) -> Iterator[tuple[int, Tensor, Tensor, Rotation | None]]:
    """Each layer without a window, its keys, its values, and the rotation of its keys."""
    for layer in full_layers(model):
        k, v = kv[layer]
        positions = torch.arange(k.shape[1], device=k.device)
        yield layer, k, v, rotation_of(model, layer, positions)


def _agreement(worth: TokenWorth, model: Any, repeated: Repeated, share: float) -> float:
    predicted = torch.stack([worth.predict(*one) for one in _layers(model, repeated.kv)])
    drawn = repeated.drawn[full_layers(model)]
    count = max(int(share * drawn.numel()), 1)
    return float((best_of_all(drawn, count) & best_of_all(predicted, count)).sum()) / count


def summary(fit: TokenFit, file: Path) -> list[str]:
    """Return lines for people on the fit."""
    agreement = "   ".join(f"{share:.0%}: {found:.1%}" for share, found in fit.agreement.items())
    return [
        f"{file}: fitted on {fit.contexts} contexts, {fit.tokens} tokens, in {fit.seconds:.0f} s",
        f"of the best entries of contexts it has not seen, it finds   {agreement}",
    ]

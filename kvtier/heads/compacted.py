"""The retention policy with compaction, on a plain transformers model.

What `kvtier.heads.policy` is for the head split, this is for Compactor: a prefill that remembers
what the scores need, and a session whose CA heads keep a share of every finished turn. Curves are
calibrated with it, and the engine's tokens are compared with it. The scores themselves are
`kvtier_kernels.scores`, which tests hold to dense definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvtier.errors import UnsupportedModelError
from kvtier.heads.policy import CHUNK_TOKENS, DEFAULT_RULE, Block, PolicySession
from kvtier.heads.profile import HeadProfile
from kvtier.retention.compactor import Compactor
from kvtier.retention.locality import LocalityRule
from kvtier_kernels.scores import unrotate, window_mass

NLL_STRIDE = 4

KeepCount = Callable[[int, int], int]
"""(prompt tokens of the turn, droppable ones among them) -> how many of those to keep."""


class ScoredSession(PolicySession):
    """A policy session that remembers, of the turn under way, what compaction asks for.

    mass: per layer, chunks of float32 `[kv_heads, tokens]`: window mass times the value's norm
    nll:  of every `nll_stride`-th prompt token's successor, nats
    """

    def __init__(
        self,
        model: Any,
        profile: HeadProfile,
        rule: LocalityRule = DEFAULT_RULE,
        chunk_tokens: int = CHUNK_TOKENS,
        compactor: Compactor | None = None,
        nll_stride: int = NLL_STRIDE,
    ) -> None:
        super().__init__(model, profile, rule, chunk_tokens)
        self.compactor = compactor or Compactor()
        self.nll_stride = nll_stride
        self.mass: list[list[Tensor]] = [[] for _ in range(profile.shape.num_layers)]
        self.nll: list[Tensor] = []

    def _attend_layer(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        tokens = q.shape[2]
        grouped = q[0].unflatten(0, (k.shape[1], -1)).permute(2, 0, 1, 3)
        start = self.num_tokens - tokens
        drawn = window_mass(
            grouped, k[0].transpose(0, 1), [0, tokens], [start], scale, self.compactor.window_tokens
        )
        self.mass[layer].append(drawn * v[0].float().norm(dim=-1))
        return super()._attend_layer(layer, q, k, v, scale)

    def _forward(self, token_ids: list[int]) -> Tensor:
        """As the base's, asking sampled positions for their successor on the way."""
        first, self.num_tokens = self.num_tokens, self.num_tokens + len(token_ids)
        last = len(token_ids) - 1
        asked = torch.arange(min(-first % self.nll_stride, last), last, self.nll_stride)
        rows = torch.cat([asked, torch.tensor([last])]).to(self.model.device)
        ids = torch.tensor([token_ids], device=self.model.device)
        positions = torch.arange(first, self.num_tokens, device=self.model.device)[None]
        output = self.model(ids, position_ids=positions, use_cache=False, logits_to_keep=rows)
        logits = output.logits[0].float()
        if asked.numel():
            successors = ids[0, rows[:-1] + 1]
            losses = torch.nn.functional.cross_entropy(logits[:-1], successors, reduction="none")
            self.nll.append(losses)
        return logits[-1]

    def mean_nll(self) -> float:
        """Of the turn under way, nats per token; NaN when nothing was asked."""
        return float(torch.cat(self.nll).double().mean()) if self.nll else float("nan")

    def scores(self, layer: int, heads: Sequence[int], keys: Tensor, first: int) -> Tensor:
        """Compactor's scores `[heads, tokens]` of some of the turn's tokens, higher = keep.

        keys:  rotated `[heads, tokens, dim]` of those heads and tokens
        first: offset of the first token in the turn
        """
        start = self.num_tokens - sum(part.shape[1] for part in self.mass[layer])
        mass = torch.cat(self.mass[layer], dim=1)[list(heads), first : first + keys.shape[1]]
        positions = torch.arange(start + first, start + first + keys.shape[1], device=keys.device)
        return self.compactor.scores(unrotated(self.model, keys, positions), mass)

    def forget(self) -> None:
        """Start a new turn."""
        self.mass = [[] for _ in self.mass]
        self.nll = []


class CompactingSession(ScoredSession):
    """A session whose CA heads keep `keep_count` entries of what locality heads drop."""

    keep_count: KeepCount

    def _settle(self, start: int, prompt_stop: int) -> None:
        span = self.rule.dropped(start, self.num_tokens, prompt_stop)
        if span.num_tokens:
            keep = self.keep_count(prompt_stop - start, span.num_tokens)
            for layer, cache in enumerate(self._anchored):
                if cache.heads and keep < span.num_tokens:
                    k = torch.cat([block.k for block in cache.fresh], dim=1)
                    v = torch.cat([block.v for block in cache.fresh], dim=1)
                    middle = k[:, span.begin : span.end]
                    scores = self.scores(layer, cache.heads, middle, span.begin)
                    chosen = self.compactor.select(scores, keep) + span.begin
                    cache.fresh = [_with_chosen(k, v, span.begin, span.end, chosen)]
        super()._settle(start, prompt_stop)
        self.forget()


def _with_chosen(k: Tensor, v: Tensor, begin: int, end: int, chosen: Tensor) -> Block:
    """The turn's KV with only `chosen` `[heads, keep]` of [begin, end) left."""
    parts = [torch.cat([t[:, :begin], gather_tokens(t, chosen), t[:, end:]], dim=1) for t in (k, v)]
    return Block(parts[0], parts[1])


def gather_tokens(x: Tensor, chosen: Tensor) -> Tensor:
    """Each head's own tokens: x `[heads, tokens, dim]`, chosen `[heads, keep]`."""
    return x.gather(1, chosen.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def unrotated(model: Any, keys: Tensor, positions: Tensor) -> Tensor:
    """Keys `[heads, tokens, dim]` before rotation. Raises UnsupportedModelError without RoPE."""
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is None:
        raise UnsupportedModelError(
            "--model-path", "a model with one rotary embedding", type(model).__name__
        )
    cos, sin = rotary(keys.unsqueeze(0), positions.unsqueeze(0))
    half = cos.shape[-1] // 2
    return unrotate(keys, cos[0, :, :half], sin[0, :, :half])

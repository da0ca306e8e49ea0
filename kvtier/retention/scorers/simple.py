"""The scorers that need nothing from the prefill: they look at no attention, and keep nothing per
token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvtier.retention.scorers.base import Span, TokenScorer, pooled, z_score
from kvtier_kernels.scores import key_difference, leverage_scores


@dataclass(frozen=True)
class DistinctKeys(TokenScorer):
    """DistinctKeys: tokens whose keys stick out stay. Two measures see different things: the
    statistical leverage of Compactor (directions that few keys share) and KeyDiff (far from the
    mean direction). Both are of keys before rotation, where what a token says is not mixed with
    where it stands.

        score = pool(z(leverage) + w · z(−cos(k, mean of the normalised keys)))

    Sources: Compactor, §3.2; Park et al., "KeyDiff", 2025. Trials on contexts of seed 3000 chose
    that both are added, of keys before rotation, and pooled over three (docs/decisions.md). It
    is the default where heads do not compete.

    difference_weight: w
    pool_width:        odd number of neighbouring tokens that share their score
    """

    name: ClassVar[str] = "distinct-keys"

    difference_weight: float = 1.0
    pool_width: int = 3

    def score(self, span: Span) -> torch.Tensor:
        leverage = z_score(leverage_scores(span.keys, span.rotation))
        difference = z_score(key_difference(span.keys, span.rotation))
        return pooled(leverage + self.difference_weight * difference, self.pool_width)


@dataclass(frozen=True)
class KeyDiff(TokenScorer):
    """KeyDiff: tokens whose keys, rotated as they are cached, are unlike the others stay (Park et
    al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
    Resource-Constrained Environments", 2025).

        score = −cos(k, mean of the normalised keys)
    """

    name: ClassVar[str] = "keydiff"

    def score(self, span: Span) -> torch.Tensor:
        return key_difference(span.keys)


@dataclass(frozen=True)
class StreamingLLM(TokenScorer):
    """StreamingLLM: the newest tokens stay (Xiao et al., "Efficient Streaming Language Models with
    Attention Sinks", ICLR 2024). The sinks are kept anyway, by the locality rule. A baseline: what
    lies further back is lost, whatever it says."""

    name: ClassVar[str] = "streaming-llm"

    def score(self, span: Span) -> torch.Tensor:
        heads, tokens = span.keys.shape[:2]
        positions = torch.arange(tokens, dtype=torch.float32, device=span.keys.device)
        return positions.expand(heads, tokens)


@dataclass(frozen=True)
class RandomTokens(TokenScorer):
    """Random tokens stay, each head's own: what a scorer must beat. The same tokens on every
    server, so that what one has stored another can restore.

    seed: of the draw, together with the span's first position
    """

    name: ClassVar[str] = "random"

    seed: int = 0

    def score(self, span: Span) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + span.first)
        return torch.rand(span.keys.shape[:2], generator=generator).to(span.keys.device)

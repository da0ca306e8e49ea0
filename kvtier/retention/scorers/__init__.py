"""The scorers of tokens, by which CA heads choose what they keep of a context, and the registry
that names them.

`kvtier serve --scorer NAME` (with `--quality`, `--retention` or a budget) chooses one.
"""

from __future__ import annotations

from kvtier.retention.scorers.base import Chunk, Span, TokenScorer
from kvtier.retention.scorers.compactor import Compactor
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.scorers.simple import DistinctKeys, KeyDiff, RandomTokens, StreamingLLM
from kvtier_kernels.scores import select

SCORERS: dict[str, type[TokenScorer]] = {
    scorer.name: scorer
    for scorer in (
        Compactor,
        DistinctKeys,
        KeyDiff,
        Reconstruction,
        StreamingLLM,
        RandomTokens,
    )
}

__all__ = ["SCORERS", "Chunk", "Span", "TokenScorer", "select"]

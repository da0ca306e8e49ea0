"""KeyDiff: tokens whose keys are unlike the others stay (Park et al., "KeyDiff: Key Similarity-
Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained Environments", 2025).

    score = −cos(k, mean of the normalised keys)

Keys as they are cached, rotated. It needs nothing from the prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvtier.retention.scorers.base import Span, TokenScorer
from kvtier_kernels.scores import key_difference


@dataclass(frozen=True)
class KeyDiff(TokenScorer):
    """See the module docstring."""

    name: ClassVar[str] = "keydiff"

    def score(self, span: Span) -> torch.Tensor:
        return key_difference(span.keys)


__all__ = ["KeyDiff"]

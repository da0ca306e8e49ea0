"""StreamingLLM: the newest tokens stay (Xiao et al., "Efficient Streaming Language Models with
Attention Sinks", ICLR 2024). The sinks are kept anyway, by the locality rule. A baseline: what lies
further back is lost, whatever it says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvtier.retention.scorers.base import Span, TokenScorer


@dataclass(frozen=True)
class StreamingLLM(TokenScorer):
    """See the module docstring."""

    name: ClassVar[str] = "streaming-llm"

    def score(self, span: Span) -> torch.Tensor:
        heads, tokens = span.keys.shape[:2]
        positions = torch.arange(tokens, dtype=torch.float32, device=span.keys.device)
        return positions.expand(heads, tokens)


__all__ = ["StreamingLLM"]

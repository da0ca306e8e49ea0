"""Block ids as tokens.

Every id stands for tokens that are drawn from the seed and the id alone, so equal ids are equal
tokens, in any order and on any machine. The partly filled block at a prompt's end is the beginning
of the block of the request that continues it (`kvtier.traffic.continuations`): as in a real
conversation, the next turn repeats the whole prompt. What it does not repeat is the answer, which
the trace does not have: the tree is left where the answer begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from kvtier.traffic.continuations import find_continuations
from kvtier.traffic.trace import Trace

CACHED_BLOCKS = 4096


class Prompts:
    """The prompts of a trace. words: token ids to draw from, in any order."""

    def __init__(self, trace: Trace, words: Sequence[int], seed: int) -> None:
        self.trace = trace
        self.links = find_continuations(trace)
        self._words = np.unique(np.asarray(words, np.int64))
        self._seed = seed
        self._block = lru_cache(CACHED_BLOCKS)(self._draw)

    def ids(self, index: int) -> list[int]:
        """Token ids of a request's prompt."""
        request = self.trace.requests[index]
        blocks = [self._block(one) for one in self.links.blocks(request)]
        return [token for block in blocks for token in block][: request.input_tokens]

    def _draw(self, block_id: int) -> list[int]:
        rng = np.random.default_rng([self._seed, block_id])
        drawn: list[int] = rng.choice(self._words, self.trace.block_tokens).tolist()
        return drawn


__all__ = ["Prompts"]

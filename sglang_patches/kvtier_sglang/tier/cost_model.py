"""The measured rates of computing and of loading context, which decide "load or recompute".

    compute   tokens per second of prefill, over chunks
    load      bytes per second, of asking the tier and of writing the pool

Both are exponential averages over what really happened. Without a recent measurement of loading, it
is assumed to pay. All of it runs in the scheduler's thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# New measurements count for this much.
WEIGHT = 0.2
# Fewer tokens than that, computed or loaded, measure overheads and not the rate.
LEAST_TOKENS = 128
# A load rate that is older says nothing about the tier of today.
LOAD_RATE_LIFE_S = 60.0


class CostModel:
    """The rates of one server, see the module docstring. clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loaded_at = 0.0
        self.compute_tokens_per_s: float | None = None
        self.load_bytes_per_s: float | None = None
        self.spill_s = 0.0

    def computed(self, seconds: float, tokens: int) -> None:
        """Note that a prefill pass of `tokens` took so many seconds."""
        if tokens >= LEAST_TOKENS and seconds > 0:
            self.compute_tokens_per_s = _average(self.compute_tokens_per_s, tokens / seconds)

    def loaded(self, seconds: float, tokens: int, num_bytes: int) -> None:
        """Note that loading so many tokens, which are so many bytes, took so many seconds."""
        if tokens >= LEAST_TOKENS and seconds > 0:
            # An average with a rate of that age would be too slow again, and no request would ask.
            old = None if self._load_rate_is_old else self.load_bytes_per_s
            self.load_bytes_per_s = _average(old, num_bytes / seconds)
            self._loaded_at = self._clock()

    @property
    def _load_rate_is_old(self) -> bool:
        return self._clock() - self._loaded_at > LOAD_RATE_LIFE_S

    def spilled(self, seconds: float) -> None:
        """Note that copying KV out held up the scheduler for so many seconds."""
        self.spill_s += seconds

    def compute_s(self, tokens: int) -> float:
        """Return the seconds that computing so many tokens takes; infinity where nothing is known
        yet."""
        if self.compute_tokens_per_s is None:
            return float("inf")
        return tokens / self.compute_tokens_per_s

    def loading_pays(self, token_bytes: int) -> bool:
        """Return whether a token's KV is loaded faster than it is computed, as far as is known."""
        if self.compute_tokens_per_s is None or self.load_bytes_per_s is None:
            return True
        if self._load_rate_is_old:
            return True
        return self.load_bytes_per_s > self.compute_tokens_per_s * token_bytes

    def report(self) -> dict[str, Any]:
        return {
            "compute_tokens_per_s": self.compute_tokens_per_s,
            "load_bytes_per_s": self.load_bytes_per_s,
            "spill_s": self.spill_s,
        }


def _average(old: float | None, new: float) -> float:
    return new if old is None else (1 - WEIGHT) * old + WEIGHT * new

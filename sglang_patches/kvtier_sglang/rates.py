"""How fast this server computes and loads context, as measured: what decides "load or recompute".

    compute   tokens per second of prefill, over chunks
    load      bytes per second from asking the tier to having written the pool
    latency   of a load of nothing

All are exponential averages over what really happened; before anything has, loading is assumed to
be worth it. Scheduler thread only.
"""

from __future__ import annotations

from typing import Any

# New measurements count for this much.
WEIGHT = 0.2
# Fewer new tokens than that measure overheads, not the rate.
LEAST_CHUNK_TOKENS = 128


class Rates:
    def __init__(self) -> None:
        self.compute_tokens_per_s: float | None = None
        self.load_bytes_per_s: float | None = None
        self.spill_s = 0.0

    def computed(self, seconds: float, tokens: int) -> None:
        """A prefill pass of `tokens` took so long."""
        if tokens >= LEAST_CHUNK_TOKENS and seconds > 0:
            self.compute_tokens_per_s = _average(self.compute_tokens_per_s, tokens / seconds)

    def loaded(self, seconds: float, num_bytes: int) -> None:
        """A load took so long."""
        if num_bytes and seconds > 0:
            self.load_bytes_per_s = _average(self.load_bytes_per_s, num_bytes / seconds)

    def spilled(self, seconds: float) -> None:
        """Copying KV out held up the scheduler for so long."""
        self.spill_s += seconds

    def compute_s(self, tokens: int) -> float:
        """How long computing so many tokens takes; long where nothing is known yet."""
        if self.compute_tokens_per_s is None:
            return float("inf")
        return tokens / self.compute_tokens_per_s

    def break_even_tokens(self, token_bytes: int) -> int:
        """Fewer tokens than that are computed faster than they are loaded; 0 where loading is
        always faster or nothing is known; a very large number where it never is."""
        if self.compute_tokens_per_s is None or self.load_bytes_per_s is None:
            return 0
        compute_s = 1 / self.compute_tokens_per_s
        load_s = token_bytes / self.load_bytes_per_s
        return 0 if load_s < compute_s else 1 << 62

    def report(self) -> dict[str, Any]:
        return {
            "compute_tokens_per_s": self.compute_tokens_per_s,
            "load_bytes_per_s": self.load_bytes_per_s,
            "spill_s": self.spill_s,
        }


def _average(old: float | None, new: float) -> float:
    return new if old is None else (1 - WEIGHT) * old + WEIGHT * new

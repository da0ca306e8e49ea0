"""The findings of a replay; see `kvtier.bench.schema` for the documents around it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.bench.schema import DocumentBase, EngineRun, Frozen, Replay


class ReplayRecord(Frozen):
    """One request. Times are from when the trace sends it, so they contain every wait.

    cached_tokens:   of the prompt, what was not computed; restored_tokens: of those, from the tier
    """

    index: int
    conversation: int
    arrival_s: float
    prompt_tokens: int
    cached_tokens: int
    restored_tokens: int
    output_tokens: int
    ttft_ms: float
    latency_ms: float

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        later = self.output_tokens - 1
        return (self.latency_ms - self.ttft_ms) / later if later else None


class Percentiles(Frozen):
    """The percentiles of a time, in the unit that its name says."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float] | npt.NDArray[np.float64]) -> Percentiles:
        """Return those of some values, and zero where there are none."""
        p50, p90, p99 = np.percentile(values, [50, 90, 99]) if np.size(values) else (0.0, 0.0, 0.0)
        return cls(p50=float(p50), p90=float(p90), p99=float(p99))


class ReplaySummary(Frozen):
    """The summary of all requests.

    hit_rate:           tokens of prompts that were not computed, over all; of them, from the tier:
                        tier_hit_rate
    goodput_share:      requests that met the SLO, of all; goodput_per_s: of them, per second
    evicted_tokens:     of cached context that made room; restored_tokens: from the tier
    resident:           conversations of whose last prompt 90% is on the device afterwards
    """

    hit_rate: float
    tier_hit_rate: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    goodput_share: float
    goodput_per_s: float
    output_tokens_per_s: float
    kv_peak_bytes: int
    evicted_tokens: int
    restored_tokens: int
    resident: int


class ReplayResult(EngineRun):
    """One policy, measured.

    chunk_tokens, max_running: of a prefill pass, and requests at once
    resident: requests whose prompts were found on the device afterwards, newest first
    """

    chunk_tokens: int
    max_running: int
    summary: ReplaySummary
    resident: tuple[int, ...]
    requests: tuple[ReplayRecord, ...]


class ReplayDocument(DocumentBase):
    """The whole outcome."""

    workload: Replay
    runs: tuple[ReplayResult, ...]

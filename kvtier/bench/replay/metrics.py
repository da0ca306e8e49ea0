"""The percentiles, hit rates and goodput of requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.bench.replay.schema import Percentiles, ReplayRecord, ReplaySummary
from kvtier.bench.schema import Occupancy, Replay


def percentiles(values: Sequence[float]) -> Percentiles:
    """Zero where there are no values."""
    p50, p90, p99 = np.percentile(values, [50, 90, 99]) if len(values) else (0.0, 0.0, 0.0)
    return Percentiles(p50=float(p50), p90=float(p90), p99=float(p99))


def meets(record: ReplayRecord, replay: Replay) -> bool:
    """Return whether a request was served as the SLO wants it."""
    tpot = record.tpot_ms
    return record.ttft_ms <= replay.slo_ttft_ms and (tpot is None or tpot <= replay.slo_tpot_ms)


def summarize(
    records: Sequence[ReplayRecord],
    replay: Replay,
    wall_s: float,
    after: Occupancy,
    resident: int,
) -> ReplaySummary:
    """Summarize all requests. after: the pool when the last one had been answered."""
    prompts = sum(record.prompt_tokens for record in records)
    restored = sum(record.restored_tokens for record in records)
    good = sum(meets(record, replay) for record in records)
    return ReplaySummary(
        hit_rate=sum(record.cached_tokens for record in records) / prompts,
        tier_hit_rate=restored / prompts,
        ttft_ms=percentiles([record.ttft_ms for record in records]),
        tpot_ms=percentiles([t for record in records if (t := record.tpot_ms) is not None]),
        goodput_share=good / len(records),
        goodput_per_s=good / wall_s,
        output_tokens_per_s=sum(record.output_tokens for record in records) / wall_s,
        kv_peak_bytes=after.kv_peak_bytes,
        evicted_tokens=after.evicted_tokens,
        restored_tokens=restored,
        resident=resident,
    )


__all__ = ["meets", "percentiles", "summarize"]

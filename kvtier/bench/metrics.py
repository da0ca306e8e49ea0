"""The metrics of turns, their summaries and ratios, made from requests. Names follow
`sglang.benchmark.serving`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvtier.bench.engine import Answer
from kvtier.bench.policies import BASELINES, POLICIES
from kvtier.bench.schema import Ratios, RequestRecord, RunResult, Summary, TurnResult

# A session is resident when at least this share of its history is still cached.
RESIDENT_SHARE = 0.9


def is_resident(cached_tokens: int, history_tokens: int) -> bool:
    """Return whether a session's history was still on the device."""
    return cached_tokens >= RESIDENT_SHARE * history_tokens


def tpot_ms(record: RequestRecord | Answer) -> float:
    """Time per output token after the first, in ms; 0 for an answer of one token."""
    later = len(record.output_ids) - 1
    return (record.latency_ms - record.ttft_ms) / later if later > 0 else 0.0


def turn_results(records: Sequence[RequestRecord]) -> tuple[TurnResult, ...]:
    """One row per turn."""
    turns = sorted({record.turn for record in records})
    return tuple(_turn([record for record in records if record.turn == turn]) for turn in turns)


def _turn(records: Sequence[RequestRecord]) -> TurnResult:
    main = [record for record in records if record.question == 0]
    readings = [record.occupancy for record in main if record.occupancy is not None]
    ttfts = [record.ttft_ms for record in main]
    turn = records[0].turn
    scores, nlls = _scores(records), _nlls(records)
    resident = sum(is_resident(r.cached_tokens, r.history_tokens) for r in main)
    return TurnResult(
        turn=turn,
        prompt_tokens=round(_median(record.prompt_tokens for record in main)),
        cached_tokens=round(_median(record.cached_tokens for record in main)),
        ttft_ms=_median(ttfts),
        p99_ttft_ms=_p99(ttfts),
        tpot_ms=_median(tpot_ms(record) for record in main),
        kv_device_bytes=round(_median(reading.kv_used_bytes for reading in readings)),
        kv_peak_bytes=max((reading.kv_peak_bytes for reading in readings), default=0),
        recall=_mean(scores),
        scored_questions=len(scores),
        nll=_mean(nlls),
        nll_questions=len(nlls),
        resident_sessions=None if turn == 1 else resident,
    )


def summarize(
    records: Sequence[RequestRecord], turns: Sequence[TurnResult], resident: int | None
) -> Summary:
    """Latencies of the follow-up turns; memory, recall and NLL of all turns."""
    main = [record for record in records if record.question == 0]
    later = [record for record in main if record.turn > 1] or main
    ttfts = [record.ttft_ms for record in later]
    return Summary(
        median_ttft_ms=_median(ttfts),
        p99_ttft_ms=_p99(ttfts),
        median_tpot_ms=_median(map(tpot_ms, later)),
        kv_device_bytes=round(_median(turn.kv_device_bytes for turn in turns)),
        kv_peak_bytes=max(turn.kv_peak_bytes for turn in turns),
        recall=_mean(_scores(records)),
        nll=_mean(_nlls(records)),
        resident_sessions=resident,
    )


def _scores(records: Iterable[RequestRecord]) -> list[float]:
    return [record.recall for record in records if record.recall is not None]


def _nlls(records: Iterable[RequestRecord]) -> list[float]:
    return [record.nll for record in records if record.nll is not None]


def _median(values: Iterable[float]) -> float:
    listed = list(values)
    return float(np.median(listed)) if listed else 0.0


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99)) if values else 0.0


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def compare(baseline: RunResult, run: RunResult) -> Ratios:
    """`run` against `baseline`: above 1 is better for `run`, in every field."""

    def smaller(value: Callable[[RunResult], float]) -> float | None:
        return _ratio(value(baseline), value(run))

    return Ratios(
        baseline=baseline.policy,
        policy=run.policy,
        kv_device_bytes=smaller(lambda r: r.summary.kv_device_bytes),
        kv_peak_bytes=smaller(lambda r: r.summary.kv_peak_bytes),
        median_ttft_ms=smaller(lambda r: r.summary.median_ttft_ms),
        first_ttft_ms=smaller(lambda r: r.turns[0].ttft_ms),
        median_tpot_ms=smaller(lambda r: r.summary.median_tpot_ms),
        recall=_ratio(run.summary.recall, baseline.summary.recall),
        nll=_ratio(baseline.summary.nll, run.summary.nll),
        resident_sessions=_ratio(run.summary.resident_sessions, baseline.summary.resident_sessions),
    )


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else over / under


def compare_all(runs: Sequence[RunResult]) -> tuple[Ratios | None, tuple[Ratios, ...]]:
    """The headline, kvtier against the first baseline that ran, and every other comparison."""
    by_name = {run.policy: run for run in runs}
    bases = [by_name[name] for name in BASELINES if name in by_name]
    pairs = [
        compare(base, run)
        for base in bases
        for run in runs
        if run.policy != base.policy and (run.policy not in BASELINES or base.policy == "stock")
    ]
    main = next((pair for pair in pairs if POLICIES[pair.policy].keeps == "kvtier"), None)
    return main, tuple(pair for pair in pairs if pair is not main)

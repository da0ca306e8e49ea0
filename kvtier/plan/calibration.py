"""A replica's rates from a replay of the real engine, request by request.

Requests that were served alone (no other one was there) say what prefill costs, with and without a
cached prefix and restored tokens. Those that came together and with no others say what a request
more in a pass costs, and a step of a batch. Rates are the non-negative least squares (scipy's
`nnls`) of the times over the factors in the model of `kvtier.plan.fleet.Rates`. Each time is
weighted by its inverse, so a relative error counts alike for short and long requests. What was
cached of a prompt is read as far as its cache keeps it.
`kvtier.traffic.probe` is a trace that has such requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from kvtier.bench.policies import POLICIES
from kvtier.bench.replay.schema import ReplayDocument, ReplayRecord, ReplayResult
from kvtier.config.sections import LocalitySettings
from kvtier.errors import UsageError
from kvtier.plan.fleet import UNBOUNDED, Cache, Rates, Windows
from kvtier.reading import read_json
from kvtier.retention.shares.base import CODED_PAGES, PAGE

# Fewer requests say nothing about so many rates.
LEAST_REQUESTS = 6


@dataclass(frozen=True)
class Calibration:
    """The rates of one policy. ttft_error, tpot_error: median of |fitted - measured| / measured
    over the requests that the rates were fitted to, whose number is `requests`."""

    rates: Rates
    ttft_error: float
    tpot_error: float
    requests: int


def load_replay(file: Path, argument: str = "--calibration") -> ReplayDocument:
    """Read a replay's JSON. Raises UsageError naming the argument, or file and line."""
    try:
        return ReplayDocument.model_validate(read_json(file, argument))
    except ValidationError as error:
        expected = "what `python -m kvtier.bench --trace … --json` wrote"
        raise UsageError(argument, expected, str(file)) from error


def calibrate(run: ReplayResult, cache: Cache, argument: str = "--calibration") -> Calibration:
    """Fit the rates of a run over a cache. Raises UsageError where too few of its requests were
    alone."""
    groups = groups_alone(run.requests)
    alone = [group[0] for group in groups if len(group) == 1]
    if len(alone) < LEAST_REQUESTS:
        expected = f"a replay with at least {LEAST_REQUESTS} requests that were served alone"
        raise UsageError(argument, expected, f"{len(alone)} under policy {run.policy}")
    passes = [group for group in groups if len(group) == 1 or _new(group) <= run.chunk_tokens]
    times = np.array([_ttft_s(group) for group in passes])
    terms = np.array(
        [_prefill_terms(group, run.chunk_tokens, cache.kept_share) for group in passes]
    )
    prefill, ttft_error = _fit(terms, times)
    batches = [group for group in groups if group[0].tpot_ms is not None]
    tpots = np.array([_tpot_s(group) for group in batches])
    decode, tpot_error = _fit(
        np.array([_decode_terms(group, cache.kept_share) for group in batches]), tpots
    )
    return Calibration(
        rates=Rates(
            prefill_base_s=prefill[0],
            prefill_request_s=prefill[1],
            prefill_prompt_token_s=prefill[2],
            prefill_token_s=prefill[3],
            prefill_pair_s=prefill[4],
            decode_base_s=decode[0],
            decode_request_s=decode[1],
            decode_token_s=decode[2],
            tier_latency_s=prefill[5],
            tier_token_s=prefill[6],
            tier_spill_token_s=prefill[6],
        ),
        ttft_error=ttft_error,
        tpot_error=tpot_error,
        requests=sum(map(len, groups)),
    )


def cache_of(run: ReplayResult, settings: Mapping[str, Any]) -> Cache:
    """Return the cache of a run's engine. settings: the document's. A run's tier holds all."""
    policy = POLICIES[run.policy]
    competes = policy.compacts and settings.get("head_budgets") == "adaptive"
    windows = LocalitySettings.model_validate(settings["locality"]).windows(competes=competes)
    retention = settings["retention"] if policy.compacts else None
    coded = settings.get("kept_dtype") if competes else None
    return Cache(
        policy=run.policy,
        slots=run.pools.max_total_tokens,
        compresses=policy.splits_heads,
        retention=retention or 1.0,
        page=PAGE if coded is None else CODED_PAGES[coded],
        compress_prefill=settings.get("compress_prefill", "never"),
        ca_share=run.ca_share,
        tier_tokens=0 if run.tier is None else UNBOUNDED,
        tier_span_tokens=settings["tier"]["span_tokens"],
        windows=Windows(*windows.values()),
    )


def groups_alone(records: Sequence[ReplayRecord]) -> list[list[ReplayRecord]]:
    """Return the groups of requests that arrived together and had the engine to themselves: all
    earlier ones had been answered, and no other came before all of them were."""
    groups: list[list[ReplayRecord]] = []
    for record in sorted(records, key=lambda one: one.arrival_s):
        if groups and groups[-1][0].arrival_s == record.arrival_s:
            groups[-1].append(record)
        else:
            groups.append([record])
    ends = [max(one.arrival_s + one.latency_ms / 1e3 for one in group) for group in groups]
    alone, latest = [], -math.inf
    for index, group in enumerate(groups):
        after = groups[index + 1][0].arrival_s if index + 1 < len(groups) else math.inf
        if latest <= group[0].arrival_s and ends[index] <= after:
            alone.append(group)
        latest = max(latest, ends[index])
    return alone


def _prefill_terms(
    group: Sequence[ReplayRecord], chunk_tokens: int, kept_share: float
) -> list[float]:
    """Return the factors of the rates of a group's prefill: passes, requests, tokens of their
    prompts, new tokens, pairs of tokens and of entries that they attend to, 1 where tokens were
    restored, and their number."""
    new = [record.prompt_tokens - record.cached_tokens for record in group]
    pairs = sum(
        count * (kept_share * record.cached_tokens + count / 2)
        for record, count in zip(group, new, strict=True)
    )
    restored = sum(record.restored_tokens for record in group)
    passes = math.ceil(sum(new) / chunk_tokens)
    prompts = sum(record.prompt_tokens for record in group)
    return [passes, len(group), prompts, sum(new), pairs, float(restored > 0), restored]


def _new(group: Sequence[ReplayRecord]) -> int:
    """Return the number of a group's prompt tokens that were computed."""
    return sum(record.prompt_tokens - record.cached_tokens for record in group)


def _ttft_s(group: Sequence[ReplayRecord]) -> float:
    """Return a group's mean TTFT in s: the first of requests that come together may have a pass of
    its own."""
    return sum(record.ttft_ms for record in group) / len(group) / 1e3


def _decode_terms(group: Sequence[ReplayRecord], kept_share: float) -> list[float]:
    """Return the factors of the rates of a step of requests that decode together: passes, requests,
    and the entries that they read halfway through their answers."""
    read = sum(
        one.prompt_tokens - (1 - kept_share) * one.cached_tokens + one.output_tokens / 2
        for one in group
    )
    return [1.0, len(group), read]


def _tpot_s(group: Sequence[ReplayRecord]) -> float:
    return float(np.median([one.tpot_ms for one in group if one.tpot_ms is not None])) / 1e3


def _fit(
    terms: npt.NDArray[np.float64], times: npt.NDArray[np.float64]
) -> tuple[list[float], float]:
    """Return the fitted rates and the median relative error. terms: `[times, rates]`."""
    from scipy.optimize import nnls

    # Columns of very different sizes would decide what counts as zero.
    scale = np.maximum(terms.max(axis=0), 1e-12)
    weighted = terms / scale / times[:, None]
    found, _ = nnls(weighted, np.ones(len(times)))
    rates = found / scale
    error = np.median(np.abs(terms @ rates - times) / times)
    return [float(rate) for rate in rates], float(error)

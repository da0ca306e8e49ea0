"""Rates from a replay: those that made the times are found again, alone and in batches."""

from __future__ import annotations

import pytest

from kvtier.bench.replay.schema import Percentiles, ReplayRecord, ReplayResult, ReplaySummary
from kvtier.bench.schema import PoolSizes
from kvtier.errors import UsageError
from kvtier.plan.calibration import calibrate, groups_alone
from kvtier.plan.fleet import Cache, FleetPlan, Rates
from kvtier.plan.simulate import simulate
from kvtier.traffic.prefixes import traffic_of
from kvtier.traffic.probe import probe_trace

TRUE = Rates(
    prefill_base_s=0.012,
    prefill_request_s=0.004,
    prefill_prompt_token_s=3e-6,
    prefill_token_s=9e-5,
    prefill_pair_s=2e-8,
    decode_base_s=0.011,
    decode_request_s=1.5e-3,
    decode_token_s=3e-7,
)
CHUNK = 1024


FULL = Cache("full", 20_000)
COMPRESSED = Cache("kvtier", 20_000, compresses=True, retention=0.25)


def simulated_run(cache: Cache = FULL) -> ReplayResult:
    """Return what an engine of those very rates would say of the trace that calibrates."""
    trace = probe_trace(2.0, 1e-3).scaled(16, 1.0)
    traffic = traffic_of(trace, answers_continue=False)
    plan = FleetPlan(1, TRUE, cache, chunk_tokens=CHUNK, max_running=8)
    found = simulate(traffic, plan)
    records = tuple(
        ReplayRecord(
            index=i,
            conversation=int(traffic.session[i]),
            arrival_s=float(found.arrived_s[i]),
            prompt_tokens=int(traffic.input_tokens[i]),
            cached_tokens=int(found.hit_device[i]),
            restored_tokens=0,
            output_tokens=int(traffic.output_tokens[i]),
            ttft_ms=1e3 * float(found.ttft_s[i]),
            latency_ms=1e3 * float(found.finish_s[i] - found.arrived_s[i]),
        )
        for i in range(traffic.num_requests)
    )
    nothing = Percentiles.of([])
    summary = ReplaySummary(
        hit_rate=0, tier_hit_rate=0, ttft_ms=nothing, tpot_ms=nothing, goodput_share=0,
        goodput_per_s=0, output_tokens_per_s=0, kv_peak_bytes=0, evicted_tokens=0,
        restored_tokens=0, resident=0,
    )  # fmt: skip
    return ReplayResult(
        policy="full", ca_share=1, pools=PoolSizes(budget_bytes=1, max_total_tokens=1, sessions=1),
        kv_capacity_bytes=1, load_s=0, wall_s=1, device="cpu", chunk_tokens=CHUNK, max_running=8,
        summary=summary, resident=(), requests=records,
    )  # fmt: skip


# Where less is read, reading is a smaller part of a step's time, and its rate less certain.
@pytest.mark.parametrize(
    ("cache", "reading"), [(FULL, 0.3), (COMPRESSED, 0.5)], ids=["full", "compressed"]
)
def test_the_rates_that_made_the_times_are_found_again(cache: Cache, reading: float):
    found = calibrate(simulated_run(cache), cache)
    for name in (
        *("prefill_base_s", "prefill_request_s", "prefill_token_s", "prefill_pair_s"),
        *("prefill_prompt_token_s", "decode_base_s"),
    ):
        assert getattr(found.rates, name) == pytest.approx(getattr(TRUE, name), rel=0.1), name
    assert found.rates.decode_request_s == pytest.approx(TRUE.decode_request_s, rel=0.2)
    assert found.rates.decode_token_s == pytest.approx(TRUE.decode_token_s, rel=reading)
    assert found.ttft_error < 0.02
    assert found.tpot_error < 0.02


def test_requests_that_overlap_are_not_taken_for_alone():
    run = simulated_run()
    groups = groups_alone(run.requests)
    assert max(map(len, groups)) == 8
    first, second, *rest = run.requests
    late = second.model_copy(update={"arrival_s": first.arrival_s + first.latency_ms / 2e3})
    fewer = groups_alone([first, late, *rest])
    assert sum(map(len, fewer)) == sum(map(len, groups)) - 2
    crowded = tuple(r.model_copy(update={"latency_ms": 1e9}) for r in run.requests)
    with pytest.raises(UsageError, match="--calibration: expected a replay with at least 6"):
        calibrate(run.model_copy(update={"requests": crowded}), FULL)

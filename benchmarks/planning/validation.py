"""The simulator of `kvtier plan` beside the real engine, over the same requests.

    OMP_NUM_THREADS=1 python -m benchmarks.planning.validation --trace conversation_trace.jsonl
    … --trace claude_code_sessions.jsonl.gz --sessions 8 --speed 60 --kv-budget 120m

It wants two cores: one for the engine, and one for everything beside it, as a GPU's server has.

Three policies replay the first requests of a recorded trace, or the first sessions of agents in a
closed loop, on the real engine, scaled to this machine. The simulator serves the same requests with
pools of the same size. Its rates are from another replay, of a trace made for that
(`kvtier.traffic.probe`); nothing of the judged replay is known to it. The bars are hit rate and
resident conversations within 5%, output tokens per second within 10%, and the median time to the
first token within 25%.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.common.bars import Bar
from benchmarks.common.benchmark import RESULTS, ROOT, Arguments, Benchmark, Measured, Options
from benchmarks.common.table import new_table, show
from kvtier.bench.__main__ import run_all
from kvtier.bench.options import parse_options
from kvtier.bench.planning import make_plans
from kvtier.bench.recorded import open_trace
from kvtier.bench.replay.schema import ReplayDocument, ReplayResult
from kvtier.errors import StartupError
from kvtier.plan.calibration import Calibration, cache_of, calibrate
from kvtier.plan.fleet import FleetPlan
from kvtier.plan.simulate import simulate
from kvtier.traffic.formats import read_trace
from kvtier.traffic.prefixes import traffic_of
from kvtier.traffic.probe import probe_trace
from kvtier.traffic.trace import BLOCK_TOKENS, Trace

POLICIES = "full,kvtier,kvtier-tier"
# These settings of a full-sized server, in tokens, are scaled like the lengths.
SCALED_SETTINGS = {
    "LOCALITY_SINK_TOKENS": 128,
    "LOCALITY_RECENT_TOKENS": 512,
    "LOCALITY_BRANCH_RECENT_TOKENS": 256,
    "TIER_SPAN_TOKENS": 512,
}
# The replay that calibrates: few bytes of KV, so that something is restored; s between requests.
PROBE_BUDGET, PROBE_GAP_S = "40m", 1.2
# A scaled token of the replay that calibrates may take so many s, on any machine of today.
TOKEN_S = 2.5e-4
HIT_RATE, RESIDENT, THROUGHPUT, TTFT = 0.05, 0.05, 0.1, 0.25


def declare(arguments: Arguments) -> None:
    arguments.add("--trace", required=True, metavar="FILE", help="in Mooncake's format")
    arguments.add("--policies", default=POLICIES, help="of the bench (%(default)s)")
    arguments.whole("--requests", 300, "of it, the first ones, where it is not of sessions")
    arguments.whole("--sessions", 8, "of agents' sessions, the first ones, whole")
    arguments.number("--spread", 600.0, "s within which these begin")
    arguments.whole("--block-tokens", 32, "what a block of 512 tokens becomes on this machine")
    arguments.number("--speed", 1.0, "requests arrive so many times as fast")
    arguments.add("--kv-budget", default="152m", metavar="SIZE", help="bytes of KV (%(default)s)")


def run(options: Options) -> Measured:
    # A bad file is refused before an engine starts.
    recorded = read_trace(Path(options.trace), spread_s=options.spread, seed=options.seed)
    with scaled_windows(options.block_tokens), tempfile.TemporaryDirectory() as name:
        probe = Path(name) / "probe.jsonl"
        token_s = TOKEN_S * options.block_tokens / BLOCK_TOKENS
        probe_trace(PROBE_GAP_S, token_s).write(probe)
        calibrating = replay(options, probe, PROBE_BUDGET, options.block_tokens)
        trace = Path(name) / "judged.jsonl"
        beginning(recorded, options).write(trace)
        speed = str(options.speed)
        judged = replay(options, trace, options.kv_budget, options.block_tokens, "--speed", speed)
        rows = [
            compare(judged, real, calibrate(probed, cache_of(probed, calibrating.settings)))
            for probed, real in zip(calibrating.runs, judged.runs, strict=True)
        ]
    show_rows(rows)
    figures = {
        "workload": judged.workload.model_dump() | {"trace": Path(options.trace).name},
        "model": judged.model["shape"],
        "rows": rows,
        "replayed": [one.summary.model_dump() for one in judged.runs],
    }
    return Measured(figures, [bar for row in rows for bar in bars(row)])


def beginning(recorded: Trace, options: Options) -> Trace:
    """Return the first sessions of a trace whose requests wait for answers, subagents included, and
    the first requests of another."""
    if all(one.delay_s is None for one in recorded.requests):
        return recorded.first(options.requests)
    roots = [str(one.session).partition("/")[0] for one in recorded.requests]
    first = list(dict.fromkeys(roots))[: options.sessions]
    pairs = zip(roots, recorded.requests, strict=True)
    return replace(recorded, requests=tuple(one for root, one in pairs if root in first))


def scaled_windows(block_tokens: int) -> Any:
    """Return a block in which this process's environment has SCALED_SETTINGS, scaled."""
    scaled = {
        f"KVTIER_{name}": str(max(1, tokens * block_tokens // BLOCK_TOKENS))
        for name, tokens in SCALED_SETTINGS.items()
    }
    return mock.patch.dict(os.environ, scaled)


def replay(
    options: Options, trace: Path, budget: str, block_tokens: int, *more: str
) -> ReplayDocument:
    """Replay a trace on the real engine, as `python -m kvtier.bench` does. Raises StartupError
    where a policy failed."""
    flags = [
        *("--trace", str(trace), "--block-tokens", str(block_tokens)),
        *("--policies", options.policies, "--kv-budget", budget, "--device", "cpu"),
        *("--model-path", str(ROOT / "models" / "kvtier-demo"), "--seed", str(options.seed)),
        *more,
    ]
    asked = parse_options(flags)
    model, plans = make_plans(asked)
    document = run_all(asked, model, plans, tuple(flags))
    if document.failures:
        raise StartupError("\n".join(document.failures[0].log_tail))
    assert isinstance(document, ReplayDocument)
    return document


def compare(judged: ReplayDocument, real: ReplayResult, calibration: Calibration) -> dict[str, Any]:
    """Simulate a policy's replay. Returns pairs of the engine's figure and the simulated one."""
    plan = FleetPlan(
        replicas=1,
        rates=calibration.rates,
        cache=cache_of(real, judged.settings),
        chunk_tokens=real.chunk_tokens,
        max_running=real.max_running,
    )
    traffic = traffic_of(open_trace(judged.workload), answers_continue=False)
    outcome = simulate(traffic, plan)
    inputs = int(traffic.input_tokens.sum())
    ttft_ms = outcome.ttft_s * 1e3
    tpot_ms = outcome.tpot_s[~np.isnan(outcome.tpot_s)] * 1e3
    return {
        "policy": real.policy,
        "rates": vars(calibration.rates),
        "fitted": {"ttft": calibration.ttft_error, "tpot": calibration.tpot_error},
        "hit rate": [
            real.summary.hit_rate,
            int((outcome.hit_device + outcome.hit_tier).sum()) / inputs,
        ],
        "of it by the tier": [real.summary.tier_hit_rate, int(outcome.hit_tier.sum()) / inputs],
        "resident": [real.summary.resident, outcome.resident_sessions],
        "output tokens/s": [
            real.summary.output_tokens_per_s,
            int(traffic.output_tokens.sum()) / float(np.nanmax(outcome.finish_s)),
        ],
        "TTFT p50, ms": [real.summary.ttft_ms.p50, float(np.median(ttft_ms))],
        "TTFT p90, ms": [real.summary.ttft_ms.p90, float(np.percentile(ttft_ms, 90))],
        "TPOT p50, ms": [real.summary.tpot_ms.p50, float(np.median(tpot_ms))],
        "TPOT p90, ms": [real.summary.tpot_ms.p90, float(np.percentile(tpot_ms, 90))],
        "tokens evicted": [real.summary.evicted_tokens, outcome.evicted_tokens],
    }


def show_rows(rows: list[dict[str, Any]]) -> None:
    table = new_table(
        "The engine, and its simulation", ("policy", "what", "engine", "simulated", "off by"),
        left=("policy", "what"),
    )  # fmt: skip
    for row in rows:
        for name, pair in row.items():
            if isinstance(pair, list):
                real, simulated = (f"{value:,.4g}" for value in pair)
                table.add_row(row["policy"], name, real, simulated, f"{off(pair):+.1%}")
    show(table)


def off(pair: list[float]) -> float:
    """Return the difference of the simulated value from the real one, as a share of that."""
    real, simulated = pair
    if real == simulated:
        return 0.0
    return simulated / real - 1 if real else float("inf")


def bars(row: Mapping[str, Any]) -> list[Bar]:
    """Return the bars of one policy."""
    limits = {
        "hit rate": HIT_RATE,
        "resident": RESIDENT,
        "output tokens/s": THROUGHPUT,
        "TTFT p50, ms": TTFT,
    }
    return [
        Bar(
            f"{row['policy']}: {name} of the simulation",
            f"{off(row[name]):+.1%}",
            abs(off(row[name])) <= limit,
            f"within {limit:.0%} of the engine's",
        )
        for name, limit in limits.items()
    ]


BENCHMARK = Benchmark(
    "planning.validation", __doc__, declare, run, out=RESULTS / "planning-validation.json"
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())

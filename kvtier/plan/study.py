"""One question to the planner, from options to answers: traffic, a replica under every policy, and
the fleet that each of them wants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvtier.bench.policies import POLICIES
from kvtier.bench.schema import Frozen
from kvtier.environment import Environment
from kvtier.errors import UsageError
from kvtier.plan.answers import Answers, Slo, answers_of
from kvtier.plan.calibration import cache_of, calibrate, load_replay
from kvtier.plan.fleet import UNBOUNDED, Cache, FleetPlan
from kvtier.plan.hardware import Assumptions, Replica, find_replica
from kvtier.plan.simulate import simulate
from kvtier.retention.shares.base import CODED_PAGES, PAGE
from kvtier.traffic.described import Description, make_traffic
from kvtier.traffic.formats import read_trace
from kvtier.traffic.lru import hit_rates
from kvtier.traffic.prefixes import Traffic, copies, traffic_of

# Sizes of the curve over an LRU cache, in tokens.
CURVE_TOKENS = tuple(2.0**power for power in range(16, 31))
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Question:
    """A question to the planner.

    trace, requests, copies, spread_s: recorded traffic, so many times; or described: a workload
    calibration: a replay's JSON, whose engine is a replica; or gpu, model, tp: stated figures
    replicas:    the fleet's size; None: the fewest up to max_replicas that meet the SLO's times
    tier_bytes:  the bytes that each replica's machine gives to the tier
    """

    policies: tuple[str, ...]
    slo: Slo
    trace: Path | None = None
    requests: int | None = None
    copies: int = 1
    spread_s: float = 0.0
    described: Description = field(default_factory=Description)
    calibration: Path | None = None
    gpu: str = "h100"
    model: str = "llama-3-70b"
    tp: int = 8
    assumed: Assumptions = field(default_factory=Assumptions)
    ca_share: float = 1.0
    retention: float = 0.25
    kept_dtype: str | None = None
    compress_prefill: str = "auto"
    tier_bytes: float = 1e12
    replicas: int | None = None
    max_replicas: int = 4096
    chunk_tokens: int = 8192
    max_running: int = 64
    routing: str = "affinity"
    routing_slack: int = 8
    schedule_policy: str = "fcfs"
    gpu_hour_cost: float | None = None
    warm_s: float = 0.0
    seed: int = 0


class PolicyPlan(Frozen):
    """The plan of one policy. best: the least fleet that meets the SLO's times, None where no size
    did; tried: all fleets that were simulated, by size."""

    policy: str
    rates: dict[str, float]
    cache: dict[str, Any]
    best: Answers | None
    tried: tuple[Answers, ...]

    @property
    def shown(self) -> Answers:
        """Return the fleet to show: the best, or the largest that was tried."""
        return self.best or self.tried[-1]


class PlanDocument(Frozen):
    """The whole answer. lru: for a trace, pairs of a size in tokens and the share of input tokens
    that one LRU cache of that size would hit."""

    schema_version: Literal[1] = 1
    started_at: str
    command: tuple[str, ...]
    environment: Environment
    traffic: dict[str, Any]
    replica: dict[str, Any]
    slo: Slo
    lru: tuple[tuple[float, float], ...] = ()
    policies: tuple[PolicyPlan, ...]


def ask(question: Question, tell: Tell = lambda text: None) -> dict[str, Any]:
    """Return the fields of the answer, but for those of where it was made. Raises UsageError."""
    traffic, described, lru = open_traffic(question)
    found = []
    for base in replicas_of(question):
        policy = base.cache.policy
        tell(f"{policy}: simulating {traffic.num_requests:,} requests")
        found.append(_plan(question, traffic, base, tell))
    return {
        "traffic": described,
        "replica": _stated(question),
        "slo": question.slo,
        "lru": lru,
        "policies": tuple(found),
    }


def open_traffic(
    question: Question,
) -> tuple[Traffic, dict[str, Any], tuple[tuple[float, float], ...]]:
    """Return the traffic, its description, and a trace's LRU curve. Raises UsageError."""
    if question.trace is None:
        traffic = make_traffic(question.described, question.seed)
        return traffic, {"described": asdict(question.described), **_sizes(traffic)}, ()
    trace = read_trace(question.trace, spread_s=question.spread_s, seed=question.seed)
    if question.requests is not None:
        if question.requests > len(trace.requests):
            raise UsageError("--requests", f"at most {len(trace.requests)}", question.requests)
        trace = trace.first(question.requests)
    traffic = traffic_of(trace)
    curve = tuple(zip(CURVE_TOKENS, hit_rates(trace, CURVE_TOKENS), strict=True))
    if question.copies > 1 or question.spread_s:
        traffic = copies(traffic, question.copies, question.spread_s, question.seed)
    said = {"trace": question.trace.name, "copies": question.copies, "spread_s": question.spread_s}
    return traffic, {**said, **_sizes(traffic)}, curve


def _sizes(traffic: Traffic) -> dict[str, Any]:
    return {
        "requests": traffic.num_requests,
        "sessions": traffic.num_sessions,
        "mean_input_tokens": float(traffic.input_tokens.mean()),
        "mean_output_tokens": float(traffic.output_tokens.mean()),
    }


def replicas_of(question: Question) -> list[FleetPlan]:
    """Return a fleet of one replica for each policy. Raises UsageError."""
    scheduled = {
        name: getattr(question, name) for name in ("routing", "routing_slack", "schedule_policy")
    }
    if question.calibration is None:
        replica = find_replica(question.gpu, question.model, question.tp, question.assumed)
        return [
            FleetPlan(
                replicas=1,
                rates=replica.rates(),
                cache=cache_on(replica, question, policy),
                gpus_per_replica=question.tp,
                chunk_tokens=question.chunk_tokens,
                max_running=question.max_running,
                **scheduled,
            )
            for policy in question.policies
        ]
    document = load_replay(question.calibration)
    runs = {run.policy: run for run in document.runs}
    for policy in question.policies:
        if policy not in runs:
            raise UsageError("--policies", f"some of {', '.join(runs)}, as calibrated", policy)
    caches = {policy: cache_of(runs[policy], document.settings) for policy in question.policies}
    return [
        FleetPlan(
            replicas=1,
            rates=calibrate(run, caches[run.policy]).rates,
            cache=caches[run.policy],
            chunk_tokens=run.chunk_tokens,
            max_running=run.max_running,
            **scheduled,
        )
        for run in (runs[policy] for policy in question.policies)
    ]


def cache_on(replica: Replica, question: Question, policy: str) -> Cache:
    """Return the cache of a replica of stated hardware under a policy."""
    slots = int(replica.kv_budget_bytes / replica.kv_token_bytes)
    if not POLICIES[policy].splits_heads:
        return Cache(policy, slots)
    tier_tokens = int(question.tier_bytes / replica.kv_token_bytes)
    return Cache(
        policy=policy,
        slots=slots,
        compresses=True,
        retention=question.retention,
        page=PAGE if question.kept_dtype is None else CODED_PAGES[question.kept_dtype],
        compress_prefill=question.compress_prefill,
        ca_share=question.ca_share,
        tier_tokens=tier_tokens if POLICIES[policy].has_tier else 0,
    )


def _plan(question: Question, traffic: Traffic, base: FleetPlan, tell: Tell) -> PolicyPlan:
    def answer(replicas: int) -> Answers:
        plan = base.with_replicas(replicas)
        if 0 < base.cache.tier_tokens < UNBOUNDED:
            whole = replicas * base.cache.tier_tokens
            plan = replace(plan, cache=replace(base.cache, tier_tokens=whole))
        found = answers_of(
            simulate(traffic, plan),
            question.slo,
            gpu_hour_cost=question.gpu_hour_cost,
            warm_s=question.warm_s,
        )
        tell(
            f"{base.cache.policy}: {replicas} replicas, SLO met: {found.verdict}; TTFT p90 "
            f"{found.ttft_s.p90:.2f} s, TPOT p90 {found.tpot_s.p90 * 1e3:.1f} ms"
        )
        return found

    if question.replicas is not None:
        tried = [answer(question.replicas)]
        best = tried[0] if tried[0].meets_times else None
    else:
        begin = least_replicas(traffic, base)
        best, tried = fewest_replicas(answer, question.max_replicas, begin)
    return PolicyPlan(
        policy=base.cache.policy,
        rates=asdict(base.rates),
        cache=asdict(base.cache),
        best=best,
        tried=tuple(tried),
    )


def fewest_replicas(
    answer: Callable[[int], Answers], at_most: int, begin: int = 1
) -> tuple[Answers | None, list[Answers]]:
    """Return the least fleet that meets its times, or None where `at_most` replicas do not, and all
    tries by size. answer: simulates so many replicas; begin: a first guess.

    A request that one replica cannot hold is refused by any number of them, so refusals are told
    and not searched for. More replicas do not make a fleet slower, as far as routing spreads
    requests, so the least number is found by doubling and halving. The tries together are the curve
    over the fleet's size.
    """
    tried: dict[int, Answers] = {}

    def meets(replicas: int) -> bool:
        if replicas not in tried:
            tried[replicas] = answer(replicas)
        return tried[replicas].meets_times

    low, high = 0, min(max(1, begin), at_most)
    while not meets(high):
        if high == at_most:
            return None, [tried[size] for size in sorted(tried)]
        low, high = high, min(2 * high, at_most)
    while high - low > 1:
        middle = (low + high) // 2
        if meets(middle):
            high = middle
        else:
            low = middle
    return tried[high], [tried[size] for size in sorted(tried)]


def least_replicas(traffic: Traffic, base: FleetPlan) -> int:
    """Return a first guess: the number of replicas that computing a half of all prompts keeps busy
    while the traffic lasts."""
    known = traffic.arrival_s[np.isfinite(traffic.arrival_s)]
    duration_s = max(1.0, float(known.max() - known.min()))
    tokens = traffic.input_tokens.astype(np.float64)
    work_s = base.rates.prefill_token_s * tokens + base.rates.prefill_pair_s * tokens**2 / 2
    return max(1, math.ceil(0.5 * float(work_s.sum()) / duration_s))


def _stated(question: Question) -> Mapping[str, Any]:
    """Return the description of a replica, with every assumption."""
    common = {
        "routing": question.routing,
        "schedule_policy": question.schedule_policy,
        "tier_bytes_per_replica": question.tier_bytes,
    }
    if question.calibration is not None:
        return {"calibration": question.calibration.name, **common}
    replica = find_replica(question.gpu, question.model, question.tp, question.assumed)
    return {
        "gpu": question.gpu,
        "model": question.model,
        "tp": question.tp,
        "accelerator": asdict(replica.accelerator),
        "model_shape": asdict(replica.model),
        "assumed": asdict(question.assumed),
        "kv_bytes_per_token": replica.kv_token_bytes,
        "kv_budget_bytes": replica.kv_budget_bytes,
        "ca_share": question.ca_share,
        "retention": question.retention,
        "kept_dtype": question.kept_dtype,
        "compress_prefill": question.compress_prefill,
        "chunk_tokens": question.chunk_tokens,
        "max_running": question.max_running,
        **common,
    }

"""The figures of a simulated fleet: hit rates by level, percentiles, residents, cost."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pydantic import Field

from kvtier.bench.replay.schema import Percentiles
from kvtier.bench.schema import Frozen
from kvtier.plan.simulate import Outcome

SECONDS_PER_HOUR = 3600


class Slo(Frozen):
    """An objective: this percentile of both times is at most so long, and no request is refused."""

    ttft_s: float = Field(gt=0)
    tpot_s: float = Field(gt=0)
    percentile: float = Field(90.0, gt=0, lt=100)


class Answers(Frozen):
    """The figures of one fleet under one policy.

    requests, refused: requests that were served and counted, and those that no replica could hold
    least_refused_tokens: input and output of the shortest refused; None where none was
    request_room_tokens: tokens of exact KV that a replica holds for one request
    hit_device, hit_tier, recomputed: shares of the prompts' tokens, over all requests
    goodput_share:     share of the requests that met the SLO's times
    resident_sessions: their number at the end
    cost_per_million_tokens: cost of a million tokens, inputs and outputs alike, while the traffic
                       lasts; None without a price
    """

    policy: str
    replicas: int
    gpus: int
    requests: int
    refused: int
    least_refused_tokens: int | None
    request_room_tokens: int
    hit_device: float
    hit_tier: float
    recomputed: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    goodput_share: float
    meets_times: bool
    resident_sessions: int
    sessions: int
    evicted_tokens: int
    duration_s: float
    output_tokens_per_s: float
    cost_per_million_tokens: float | None

    @property
    def meets_slo(self) -> bool:
        """Return whether the times are met and nothing was refused."""
        return self.meets_times and self.refused == 0

    @property
    def verdict(self) -> str:
        """Return "yes" where the SLO is met, and otherwise the parts of it that are not."""
        if self.meets_slo:
            return "yes"
        times = [] if self.meets_times else ["times" if self.requests else "nothing served"]
        refused = [f"{self.refused:,} refused"] if self.refused else []
        return "NO: " + ", ".join(times + refused)


def answers_of(
    outcome: Outcome, slo: Slo, *, gpu_hour_cost: float | None = None, warm_s: float = 0.0
) -> Answers:
    """Summarize an outcome. warm_s: requests that arrive earlier only fill the cache;
    gpu_hour_cost: the price of one accelerator."""
    served = ~outcome.refused
    counted = served & (outcome.arrived_s >= warm_s)
    inputs = outcome.traffic.input_tokens.astype(np.int64)[counted]
    outputs = outcome.traffic.output_tokens.astype(np.int64)[counted]
    ttft, tpot = outcome.ttft_s[counted], outcome.tpot_s[counted]
    known_tpot = tpot[~np.isnan(tpot)]
    device, tier = outcome.hit_device[counted].sum(), outcome.hit_tier[counted].sum()
    total = max(1, int(inputs.sum()))
    good = (ttft <= slo.ttft_s) & ~(tpot > slo.tpot_s)
    begin = max(warm_s, float(np.nanmin(outcome.arrived_s)))
    duration_s = max(1e-9, float(np.max(outcome.finish_s[served], initial=0.0)) - begin)
    gpus = outcome.plan.replicas * outcome.plan.gpus_per_replica
    refused = (outcome.traffic.input_tokens + outcome.traffic.output_tokens)[outcome.refused]
    meets = (
        bool(counted.any())
        and _at(ttft, slo.percentile) <= slo.ttft_s
        and _at(known_tpot, slo.percentile) <= slo.tpot_s
    )
    cost = None
    if gpu_hour_cost is not None:
        spent = gpus * gpu_hour_cost * duration_s / SECONDS_PER_HOUR
        cost = spent / (total + int(outputs.sum())) * 1e6
    return Answers(
        policy=outcome.plan.cache.policy,
        replicas=outcome.plan.replicas,
        gpus=gpus,
        requests=int(counted.sum()),
        refused=len(refused),
        least_refused_tokens=int(refused.min()) if len(refused) else None,
        request_room_tokens=outcome.plan.cache.slots,
        hit_device=float(device / total),
        hit_tier=float(tier / total),
        recomputed=float(1 - (device + tier) / total),
        ttft_s=Percentiles.of(ttft),
        tpot_s=Percentiles.of(known_tpot),
        goodput_share=float(good.mean()) if len(good) else 0.0,
        meets_times=meets,
        resident_sessions=outcome.resident_sessions,
        sessions=outcome.traffic.num_sessions,
        evicted_tokens=outcome.evicted_tokens,
        duration_s=duration_s,
        output_tokens_per_s=float(outputs.sum() / duration_s),
        cost_per_million_tokens=cost,
    )


def _at(values: npt.NDArray[np.float64], percentile: float) -> float:
    return float(np.percentile(values, percentile)) if len(values) else 0.0

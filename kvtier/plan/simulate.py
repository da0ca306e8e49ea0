"""The simulation of traffic through a fleet: the compiled loop, its arguments and its outcome."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import UsageError
from kvtier.plan.fleet import ROUTINGS, STREAMING, FleetPlan
from kvtier.plan.hints import Hints, owners
from kvtier.pool_sizing import IN_FLIGHT_SHARE
from kvtier.retention.shares.base import PAGE
from kvtier.traffic.prefixes import Traffic

try:
    from numba.core.errors import NumbaTypeSafetyWarning

    from kvtier.plan.core import loop
    from kvtier.plan.core.state import (
        Asked,
        Fleet,
        World,
        asked,
        new_world,
        with_hints,
        with_more_units,
    )
except ImportError as error:  # pragma: no cover - where the engine is not installed
    raise UsageError(
        "kvtier plan", "numba, which `pip install 'kvtier[plan]'` and SGLang bring", str(error)
    ) from error

FIRST_UNITS = 1 << 16
# The loop wants fewer units than that to be free, per running request, before every event.
UNITS_PER_RUNNING = 40


@dataclass(frozen=True)
class Outcome:
    """The outcome of every request, and of the fleet. Arrays are as long as the traffic.

    arrived_s, first_s, finish_s: times of arrival, of the first token and of the last; the two of
              tokens are nan for a request that no replica could hold (`refused`)
    hit_device, hit_tier: tokens of the prompt that were on the device, or came from the tier
    resident_sessions: sessions whose last prompt is on the device at the end (90% of it)
    evicted_tokens: tokens evicted by all replicas; peak_slots: most slots used in any of them
    """

    traffic: Traffic
    plan: FleetPlan
    arrived_s: npt.NDArray[np.float64]
    first_s: npt.NDArray[np.float64]
    finish_s: npt.NDArray[np.float64]
    hit_device: npt.NDArray[np.int64]
    hit_tier: npt.NDArray[np.int64]
    replica: npt.NDArray[np.int64]
    refused: npt.NDArray[np.bool_]
    resident_sessions: int
    evicted_tokens: int
    peak_slots: int

    @property
    def ttft_s(self) -> npt.NDArray[np.float64]:
        """Return the times to the first token, in s."""
        return self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> npt.NDArray[np.float64]:
        """Return the times per output token after the first, in s; nan for answers of one token."""
        later = self.traffic.output_tokens.astype(np.float64) - 1
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(later > 0, (self.finish_s - self.first_s) / later, np.nan)


def simulate(traffic: Traffic, plan: FleetPlan, hints: Hints | None = None) -> Outcome:
    """Serve all of the traffic. Equal arguments give equal outcomes."""
    world, fleet, tables = run(traffic, plan, hints)
    last = np.zeros(traffic.num_sessions, np.int32)
    np.maximum.at(last, traffic.session, np.arange(traffic.num_requests, dtype=np.int32))
    found, replicas = world.requests, world.replicas
    return Outcome(
        traffic=traffic,
        plan=plan,
        arrived_s=np.array(found.arrived_s),
        first_s=np.array(found.first_s),
        finish_s=np.array(found.finish_s),
        hit_device=found.hit_device.astype(np.int64),
        hit_tier=found.hit_tier.astype(np.int64),
        replica=found.replica.astype(np.int64),
        refused=np.array(found.refused),
        resident_sessions=int(loop.count_resident(world, tables, fleet, last)),
        evicted_tokens=int(replicas.evicted.sum()),
        peak_slots=int(replicas.peak.max()),
    )


def run(
    traffic: Traffic, plan: FleetPlan, hints: Hints | None = None
) -> tuple[World, Fleet, Asked]:
    """Serve all of the traffic. Returns the fleet's state when everything is answered, and the
    fleet and the traffic as the loop took them."""
    fleet, tables = _numbers(plan, hints), asked(traffic)
    world = new_world(fleet, traffic, FIRST_UNITS + UNITS_PER_RUNNING * (plan.max_running + 1))
    if hints is not None:
        world = with_hints(world, *hints.filled(traffic, plan.cache.retention), owners(traffic))
    independent = np.flatnonzero(np.isfinite(traffic.arrival_s))
    order = independent[np.argsort(traffic.arrival_s[independent], kind="stable")].astype(np.int32)
    with warnings.catch_warnings():
        # numba warns of numbers that become 32 bits wide when it compiles a call; those of
        # requests, units and nodes are no wider.
        warnings.simplefilter("ignore", NumbaTypeSafetyWarning)
        while loop.run(world, tables, fleet, order) == loop.NEEDS_UNITS:
            world = with_more_units(world)
    return world, fleet, tables


def _numbers(plan: FleetPlan, hints: Hints | None) -> Fleet:
    cache = plan.cache
    rates: dict[str, Any] = {name: float(rate) for name, rate in asdict(plan.rates).items()}
    kept = cache.retention * cache.ca_share * PAGE / cache.page
    compresses = cache.compresses and kept < 1
    in_flight = int(IN_FLIGHT_SHARE * cache.slots) if compresses else cache.slots
    return Fleet(
        replicas=plan.replicas,
        slots=cache.slots,
        compresses=compresses,
        streams=STREAMING.index(cache.compress_prefill if compresses else "never"),
        **asdict(cache.windows),
        retention=float(cache.retention),
        page=cache.page,
        ca_share=float(cache.ca_share),
        in_flight_slots=in_flight,
        chunk=plan.chunk_tokens,
        max_running=plan.max_running,
        **rates,
        tier_tokens=cache.tier_tokens,
        tier_span=cache.tier_span_tokens,
        routing=ROUTINGS.index(plan.routing),
        routing_slack=plan.routing_slack,
        longest_first=plan.schedule_policy == "lpm",
        hinted=hints is not None,
    )

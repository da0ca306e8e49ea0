"""A replica's measured rates of computing and loading, by which it decides between them, and its
patience: a model of the engine's `kvtier_sglang.tier.cost_model`.

Both rates are exponential averages. As long as one of them is unknown, or loading was last measured
a while ago, loading is taken to pay.
"""

from __future__ import annotations

from kvtier.plan.core.compiled import compiled
from kvtier.plan.core.state import World

# The numbers are the engine's: the weight of a new measurement, the least tokens that measure a
# rate rather than overheads, the life of a load rate, and a request's longest wait for the tier.
WEIGHT = 0.2
LEAST_TOKENS = 128
LOAD_RATE_LIFE_S = 60.0
LONGEST_WAIT_S = 30.0


@compiled
def computed(world: World, replica: int, tokens: int, seconds: float) -> None:
    """Note that a prefill pass with so many tokens of one request took so long."""
    if tokens >= LEAST_TOKENS and seconds > 0:
        replicas = world.replicas
        replicas.compute_rate[replica] = _average(replicas.compute_rate[replica], tokens / seconds)


@compiled
def loaded(world: World, replica: int, tokens: int, seconds: float, now_s: float) -> None:
    """Note that loading so many tokens took so long."""
    replicas = world.replicas
    if tokens >= LEAST_TOKENS and seconds > 0:
        old = 0.0 if _is_old(world, replica, now_s) else replicas.load_rate[replica]
        replicas.load_rate[replica] = _average(old, tokens / seconds)
        replicas.loaded_s[replica] = now_s


@compiled
def loading_pays(world: World, replica: int, now_s: float) -> bool:
    """Return whether a token is loaded faster than it is computed, as far as is known."""
    replicas = world.replicas
    if replicas.compute_rate[replica] == 0 or replicas.load_rate[replica] == 0:
        return True
    if _is_old(world, replica, now_s):
        return True
    return replicas.load_rate[replica] > replicas.compute_rate[replica]


@compiled
def patience_s(world: World, replica: int, tokens: int) -> float:
    """Return the time in s that a request waits for so many tokens: that of computing them, at most
    LONGEST_WAIT_S."""
    rate = world.replicas.compute_rate[replica]
    return LONGEST_WAIT_S if rate == 0 else min(tokens / rate, LONGEST_WAIT_S)


@compiled
def _is_old(world: World, replica: int, now_s: float) -> bool:
    return now_s - world.replicas.loaded_s[replica] > LOAD_RATE_LIFE_S


@compiled
def _average(old: float, new: float) -> float:
    return new if old == 0 else (1 - WEIGHT) * old + WEIGHT * new

"""The choice of a replica for a request.

affinity      one replica for all requests of a session, drawn by its number (consistent hashing on
              a session header does that)
cache-aware   the replica that served the longest prefix last; the least loaded one where that has
              over `routing_slack` requests fewer, or where nobody knows the prefix
least-loaded  the replica with the fewest requests
two-choices   the less loaded of two replicas that are drawn by the request's number
round-robin   one replica after the other
"""

from __future__ import annotations

import numpy as np

from kvtier.plan.core import clocks
from kvtier.plan.core.compiled import compiled
from kvtier.plan.core.state import NONE, Asked, Fleet, World

# These are places in kvtier.plan.fleet.ROUTINGS.
AFFINITY, CACHE_AWARE, LEAST_LOADED, TWO_CHOICES, ROUND_ROBIN = range(5)


@compiled
def choose(world: World, traffic: Asked, fleet: Fleet, request: int) -> int:
    """Return the replica for a request that has just arrived."""
    loads = world.replicas.outstanding
    if fleet.routing == AFFINITY:
        return drawn(traffic.asks.session[request], 0, fleet.replicas)
    if fleet.routing == ROUND_ROBIN:
        world.totals.turn[0] += 1
        return world.totals.turn[0] % fleet.replicas
    if fleet.routing == TWO_CHOICES:
        one, other = drawn(request, 1, fleet.replicas), drawn(request, 2, fleet.replicas)
        return one if loads[one] <= loads[other] else other
    idlest = clocks.least(world.loads)
    if fleet.routing == LEAST_LOADED:
        return idlest
    home = _home(world, traffic, request)
    if home == NONE or loads[home] > loads[idlest] + fleet.routing_slack:
        return idlest
    return home


@compiled
def _home(world: World, traffic: Asked, request: int) -> int:
    node = traffic.asks.node[request]
    while node != NONE and world.kept.home[node] == NONE:
        node = traffic.nodes.parent[node]
    return NONE if node == NONE else world.kept.home[node]


@compiled
def note_home(world: World, traffic: Asked, request: int, replica: int) -> None:
    """Note that the request's prefix is at that replica from now on."""
    node = traffic.asks.node[request]
    while node != NONE and world.kept.home[node] != replica:
        world.kept.home[node] = replica
        node = traffic.nodes.parent[node]


@compiled
def drawn(number: int, stream: int, count: int) -> int:
    """Return a number drawn from [0, count) by the arguments alone (MurmurHash3's finaliser).
    Products are of 32 bits by 32 bits: nothing overflows, in Python neither."""
    low = np.uint64(0xFFFFFFFF)
    mixed = np.uint64(number + 1) * np.uint64(0x9E3779B1) + np.uint64(stream * 0x7FEB352D)
    mixed &= low
    mixed = ((mixed ^ (mixed >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & low
    mixed = ((mixed ^ (mixed >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & low
    mixed ^= mixed >> np.uint64(16)
    # The number is one with a sign, as numba makes floats of the two kinds together.
    return int(np.int64(mixed % np.uint64(count)))

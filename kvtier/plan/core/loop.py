"""The simulator's loop: arrivals and replicas in the order of time."""

from __future__ import annotations

import math

from kvtier.plan.core import clocks, routing
from kvtier.plan.core import replica as scheduler
from kvtier.plan.core.compiled import compiled
from kvtier.plan.core.radix import MOST_CUTS, set_path, walk
from kvtier.plan.core.state import (
    DECODING,
    IDLE,
    NONE,
    PREFILLING,
    WAITING,
    Asked,
    Fleet,
    Int32,
    World,
)
from kvtier.plan.core.tiering import fetch

DONE, NEEDS_UNITS = 0, 1
# A session is resident when at least this share of its last prompt is cached, in per cent; the
# bench's `is_resident`.
RESIDENT_PERCENT = 90


@compiled
def run(world: World, traffic: Asked, fleet: Fleet, order: Int32) -> int:
    """Go on until every request is answered (DONE), or until there might be too few units for the
    next event (NEEDS_UNITS). order: requests that wait for no other, by arrival."""
    margin = (MOST_CUTS + 4) * (fleet.max_running + 1)
    while world.totals.free_units[0] > margin:
        replica = clocks.least(world.events)
        event_s = world.events[1]
        taken = world.totals.arrivals[0]
        next_s = traffic.asks.arrival_s[order[taken]] if taken < len(order) else math.inf
        waited_s = world.waits[1]
        if event_s == math.inf and next_s == math.inf and waited_s == math.inf:
            return DONE
        if min(next_s, waited_s) <= event_s:
            if next_s <= waited_s:
                world.totals.arrivals[0] += 1
                _arrive(world, traffic, fleet, order[taken], next_s)
            else:
                session = clocks.least(world.waits)
                clocks.put(world.waits, session, math.inf)
                _arrive(world, traffic, fleet, world.waiting[session], waited_s)
            continue
        phase = world.replicas.phase[replica]
        if phase == PREFILLING:
            scheduler.finish_prefill(world, traffic, fleet, replica, event_s)
        elif phase == DECODING:
            scheduler.finish_decoding(world, traffic, fleet, replica, event_s)
        scheduler.start(world, traffic, fleet, replica, event_s)
    return NEEDS_UNITS


@compiled
def _arrive(world: World, traffic: Asked, fleet: Fleet, request: int, now_s: float) -> None:
    requests, replicas = world.requests, world.replicas
    replica = routing.choose(world, traffic, fleet, request)
    requests.arrived_s[request], requests.replica[request] = now_s, replica
    requests.ready_s[request] = now_s
    if fleet.hinted:
        session = traffic.asks.session[request]
        world.hints.priority[session] = max(0.0, world.hints.priority[session])
    replicas.outstanding[replica] += 1
    clocks.put(world.loads, replica, float(replicas.outstanding[replica]))
    routing.note_home(world, traffic, request, replica)
    if fleet.tier_tokens > 0:
        set_path(world, traffic, traffic.asks.node[request])
        limit = traffic.asks.input_tokens[request] - 1
        _, cached = walk(world, traffic, fleet, replica, limit, False, False)
        fetch(world, traffic, fleet, request, cached, now_s)
    scheduler.enqueue(world, replica, request)
    ready_s = requests.ready_s[request]
    phase = replicas.phase[replica]
    if phase == DECODING:
        scheduler.stop_decoding_at(world, fleet, replica, ready_s)
    elif phase == IDLE or (phase == WAITING and ready_s < world.events[_leaf(world, replica)]):
        replicas.phase[replica] = WAITING
        clocks.put(world.events, replica, ready_s)


@compiled
def _leaf(world: World, replica: int) -> int:
    return len(world.events) // 2 + replica


@compiled
def count_resident(world: World, traffic: Asked, fleet: Fleet, last: Int32) -> int:
    """Return the number of sessions whose last prompt is still cached where it was served. last:
    the last request of each."""
    count = 0
    for request in last:
        replica = world.requests.replica[request]
        if replica == NONE:
            continue
        tokens = traffic.asks.input_tokens[request]
        set_path(world, traffic, traffic.asks.node[request])
        _, cached = walk(world, traffic, fleet, replica, tokens, False, False)
        count += cached * 100 >= RESIDENT_PERCENT * tokens
    return count

"""A request's KV in the tree: published when its prompt is computed, compressed when its turn
ends."""

from __future__ import annotations

import math

from kvtier.plan.core.compiled import compiled
from kvtier.plan.core.radix import append, set_path, walk
from kvtier.plan.core.state import Asked, Fleet, World
from kvtier.plan.core.units import lock_path, merge_upwards, unlock_path
from kvtier.retention.shares.base import PAGE


@compiled
def publish(world: World, traffic: Asked, fleet: Fleet, request: int) -> None:
    """Put a computed prompt into the tree, where others may use it. Tokens that another request has
    published meanwhile are shared, and the request's own copy is given back."""
    requests, units, replicas = world.requests, world.units, world.replicas
    replica, anchor = requests.replica[request], requests.anchor[request]
    tokens = traffic.asks.input_tokens[request]
    set_path(world, traffic, traffic.asks.node[request])
    above, position = walk(world, traffic, fleet, anchor, tokens, True, True)
    lock_path(world, above)
    unlock_path(world, anchor)
    unit, early = above, tokens - 2 * fleet.chunk
    if requests.streams[request] and position < early:
        unit = append(world, traffic, above, early, early, early)
        one = unit
        while one != above:
            # The freed slots were never in use, as the prompt was compressed while it came.
            freed = compress(world, fleet, one)
            replicas.used[replica] += freed
            one = units.parent[one]
    unit = append(world, traffic, unit, tokens, tokens, tokens)
    requests.own[request] = unit
    # The slots set aside for the request are in its own units now, but for those of its answer.
    answer = traffic.asks.output_tokens[request] - 1
    replicas.used[replica] += answer - requests.reserved[request]
    requests.reserved[request] = answer
    while unit != above:
        replicas.used[replica] += units.slots[unit]
        unit = units.parent[unit]


@compiled
def retention_of(world: World, fleet: Fleet, node: int) -> float:
    """Return the share that is kept of the turns of a node's session."""
    if fleet.hinted:
        return world.hints.retention[world.owner[node]]
    return fleet.retention


@compiled
def streamed_slots(fleet: Fleet, tokens: int, retention: float) -> int:
    """Return the slots of so many tokens of a prompt that is compressed while it is prefilled, a
    model of `kvtier_sglang.radix.streaming.Streaming`."""
    early = tokens - 2 * fleet.chunk
    if early <= 0:
        return tokens
    return tokens - early + min(early, kept_slots(fleet, early, math.ceil(retention * early)))


@compiled
def kept_slots(fleet: Fleet, dropped: int, kept: int) -> int:
    """Return the slots that hold a dropped span of which the anchored heads keep `kept` tokens, as
    kvtier.retention.shares.base.profile_slots does for whole numbers of heads."""
    pages = math.ceil(max(1, min(dropped, kept)) / fleet.page)
    return PAGE * math.ceil(fleet.ca_share * pages + 1 - fleet.ca_share)


@compiled
def end_turn(world: World, traffic: Asked, fleet: Fleet, request: int) -> None:
    """Make a complete answer part of the tree, and compress the path where no other request uses
    it."""
    requests, units = world.requests, world.units
    own = requests.own[request]
    answer = traffic.asks.output_tokens[request] - 1
    if answer > 0:
        known, node = traffic.asks.out_known[request], traffic.asks.out_node[request]
        stop = units.stop[own] + answer
        grows = units.locks[own] == 1 and units.children[own] == 0 and not units.compressed[own]
        if grows and own != units.replica[own]:
            units.stop[own], units.known[own], units.node[own] = stop, min(known, stop), node
            units.slots[own] += answer
        else:
            set_path(world, traffic, node)
            own = append(world, traffic, own, stop, known, traffic.asks.input_tokens[request])
    requests.reserved[request] = 0
    unlock_path(world, own)
    if fleet.compresses:
        compress_path(world, fleet, own)


@compiled
def compress_path(world: World, fleet: Fleet, unit: int) -> None:
    """Compress those units of the path to a unit that no request has locked, each turn as one."""
    units = world.units
    root = units.replica[unit]
    while unit != root:
        if not units.compressed[unit] and units.locks[unit] == 0:
            merge_upwards(world, unit)
            world.replicas.evictable[root] -= compress(world, fleet, unit)
        unit = units.parent[unit]


@compiled
def compress(world: World, fleet: Fleet, unit: int) -> int:
    """Keep a share of the tokens of a unit that `kvtier.retention.locality.LocalityRule` drops.
    Returns the number of slots that are free again."""
    units, root = world.units, world.units.replica[unit]
    units.compressed[unit] = True
    start, stop = units.start[unit], units.stop[unit]
    prompt = min(max(units.prompt[unit], start), stop)
    recent = min(fleet.recent, max(1, (prompt - start) // fleet.recent_of))
    begin, end = max(fleet.sink, start), max(prompt - recent, start)
    dropped = end - begin
    if dropped <= 1:
        return 0
    units.drop_begin[unit], units.drop_end[unit] = begin, end
    retention = retention_of(world, fleet, units.node[unit])
    kept = math.ceil(retention * (prompt - start)) - (prompt - start - dropped)
    freed = dropped - min(dropped, kept_slots(fleet, dropped, kept))
    units.slots[unit] -= freed
    world.replicas.used[root] -= freed
    return freed

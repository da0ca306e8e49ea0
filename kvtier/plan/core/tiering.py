"""Exact KV in a tier that all replicas share, and fetching it.

The tier holds tokens of the traffic's nodes, least recently used ones out first. A node is held
after all before it, and put into the order of use after them, so what it evicts ends a prefix.
"""

from __future__ import annotations

from kvtier.plan.core.compiled import compiled
from kvtier.plan.core.measured import loading_pays, patience_s
from kvtier.plan.core.radix import append, set_path
from kvtier.plan.core.state import NONE, Asked, Fleet, World
from kvtier.plan.core.turns import compress


@compiled
def spill(world: World, traffic: Asked, fleet: Fleet, request: int, now_s: float) -> None:
    """A turn has ended: what the tier lacks of it is written behind the answer."""
    kept, totals = world.kept, world.totals
    node, known = traffic.asks.out_node[request], traffic.asks.out_known[request]
    while node != NONE:
        tokens = min(known, traffic.nodes.stop[node]) - traffic.nodes.start[node]
        more = tokens - kept.held[node]
        if more > 0:
            kept.since_s[node] = now_s + more * fleet.tier_spill_token_s
            kept.held[node] = tokens
            totals.held[0] += more
        _touch(world, node)
        node = traffic.nodes.parent[node]
    while totals.held[0] > fleet.tier_tokens:
        oldest = totals.oldest[0]
        _take_out(world, oldest)
        totals.held[0] -= kept.held[oldest]
        totals.evicted[0] += kept.held[oldest]
        kept.held[oldest] = 0


@compiled
def _touch(world: World, node: int) -> None:
    kept, totals = world.kept, world.totals
    if kept.newer[node] != NONE or totals.newest[0] == node:
        _take_out(world, node)
    first = totals.newest[0]
    kept.newer[node], kept.older[node] = NONE, first
    if first == NONE:
        totals.oldest[0] = node
    else:
        kept.newer[first] = node
    totals.newest[0] = node


@compiled
def _take_out(world: World, node: int) -> None:
    kept, totals = world.kept, world.totals
    newer, older = kept.newer[node], kept.older[node]
    if newer == NONE:
        totals.newest[0] = older
    else:
        kept.older[newer] = older
    if older == NONE:
        totals.oldest[0] = newer
    else:
        kept.newer[older] = newer
    kept.newer[node] = kept.older[node] = NONE


@compiled
def held_until(world: World, traffic: Asked, limit: int, now_s: float) -> int:
    """How many leading tokens of the path at hand the tier holds, up to `limit`."""
    kept, depth, reach = world.kept, 0, 0
    while world.path[depth] != NONE:
        node = world.path[depth]
        if kept.held[node] == 0 or kept.since_s[node] > now_s:
            break
        reach = traffic.nodes.start[node] + kept.held[node]
        if reach >= limit or reach < traffic.nodes.stop[node]:
            break
        depth += 1
    return min(reach, limit)


@compiled
def fetch(
    world: World, traffic: Asked, fleet: Fleet, request: int, cached: int, now_s: float
) -> None:
    """A request arrived whose replica has `cached` tokens: what the tier has behind them comes over
    the replica's link and the tier's own, one request after the other, as long as loading has been
    measured to pay. The path at hand is the request's."""
    requests, totals = world.requests, world.totals
    replica, tokens = requests.replica[request], traffic.asks.input_tokens[request]
    requests.ready_s[request] = requests.lands_s[request] = now_s
    requests.fetched[request] = requests.landed[request] = 0
    if tokens - cached < fleet.tier_span or not loading_pays(world, replica, now_s):
        return
    reach = held_until(world, traffic, tokens - 1, now_s)
    moved = reach - cached
    if moved <= 0:
        return
    begin = max(now_s, world.replicas.link_free_s[replica], totals.link_free_s[0])
    totals.link_free_s[0] = begin + moved * fleet.tier_shared_token_s
    world.replicas.link_free_s[replica] = begin + moved * fleet.tier_token_s
    lands_s = world.replicas.link_free_s[replica] + fleet.tier_latency_s
    requests.lands_s[request] = lands_s
    requests.ready_s[request] = min(lands_s, now_s + patience_s(world, replica, tokens - cached))
    requests.fetched[request], requests.landed[request] = cached, reach


@compiled
def restore(world: World, traffic: Asked, fleet: Fleet, unit: int, request: int) -> int:
    """Hang what was fetched below the locked unit that a request has matched, compressed as the
    turn that it is from had been. Its slots are reserved. Returns the unit that the request goes
    on from, locked."""
    reach = world.requests.landed[request]
    set_path(world, traffic, traffic.asks.node[request])
    deepest = append(world, traffic, fleet, unit, reach, reach, reach)
    restored = deepest
    while fleet.compresses and restored != unit:
        compress(world, fleet, restored)
        restored = world.units.parent[restored]
    return deepest


__all__ = ["fetch", "held_until", "restore", "spill"]

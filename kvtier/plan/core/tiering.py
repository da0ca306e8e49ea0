"""Exact KV in a tier that all replicas share, and fetching it.

The tier holds tokens of the traffic's nodes and evicts the least recently used first. A node is put
into the order of use before those that it follows, so an evicted node ends a prefix.

A prompt that begins with a whole earlier turn, answer included, gets that back as it was
compressed. The tokens behind it come as whole spans of exact KV, as do those of a prompt that
leaves a turn in its middle; they are compressed when the prompt's own turn ends
(`kvtier_sglang.radix.restorer`).
"""

from __future__ import annotations

from kvtier.plan.core.compiled import compiled
from kvtier.plan.core.measured import loading_pays, patience_s
from kvtier.plan.core.radix import append, set_path
from kvtier.plan.core.state import NONE, Asked, Fleet, World
from kvtier.plan.core.turns import compress
from kvtier.plan.core.units import put_newest, take_out


@compiled
def spill(world: World, traffic: Asked, fleet: Fleet, request: int, now_s: float) -> None:
    """Write the tokens of an ended turn that the tier lacks, behind the answer, and evict the
    oldest nodes that it has no room for."""
    kept, totals = world.kept, world.totals
    node, known = traffic.asks.out_node[request], traffic.asks.out_known[request]
    tokens, answer = traffic.asks.input_tokens[request], traffic.asks.output_tokens[request] - 1
    if known == tokens + answer:
        kept.turn_end[node] = known
    while node != NONE:
        tokens = min(known, traffic.nodes.stop[node]) - traffic.nodes.start[node]
        more = tokens - kept.held[node]
        if more > 0:
            kept.since_s[node] = now_s + more * fleet.tier_spill_token_s
            kept.held[node] = tokens
            totals.held[0] += more
        if kept.newer[node] != NONE or totals.newest[0] == node:
            take_out(kept, totals, 0, node)
        put_newest(kept, totals, 0, node)
        node = traffic.nodes.parent[node]
    while totals.held[0] > fleet.tier_tokens:
        oldest = totals.oldest[0]
        take_out(kept, totals, 0, oldest)
        totals.held[0] -= kept.held[oldest]
        totals.evicted[0] += kept.held[oldest]
        kept.held[oldest] = kept.turn_end[oldest] = 0


@compiled
def held_until(world: World, traffic: Asked, limit: int, now_s: float) -> int:
    """Return the number of leading tokens of the path at hand that the tier holds, at most
    `limit`."""
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
def _recorded_until(world: World, reach: int) -> int:
    """Return the end of the last turn whose KV, answer included, is within `reach` tokens of the
    path at hand; 0 for none."""
    kept, depth, found = world.kept, 0, 0
    while world.path[depth] != NONE:
        end = kept.turn_end[world.path[depth]]
        if 0 < end <= reach:
            found = end
        depth += 1
    return found


@compiled
def fetch(
    world: World, traffic: Asked, fleet: Fleet, request: int, cached: int, now_s: float
) -> None:
    """Ask the tier for the tokens behind the `cached` ones that the replica of a request has. It is
    not asked for less than a span, nor where loading has been measured not to pay.

    A replica's questions are answered one after the other. A question that finds nothing only
    delays those behind it, because the calibrated time of a prompt contains its own. The path at
    hand is the request's.
    """
    requests, totals = world.requests, world.totals
    replica, tokens = requests.replica[request], traffic.asks.input_tokens[request]
    requests.ready_s[request] = requests.lands_s[request] = now_s
    requests.fetched[request] = requests.landed[request] = requests.recorded[request] = 0
    requests.cached[request] = cached
    if tokens - cached < fleet.tier_span or not loading_pays(world, replica, now_s):
        return
    begin = max(now_s, world.replicas.link_free_s[replica])
    patient_until = now_s + patience_s(world, replica, tokens - cached)
    reach = held_until(world, traffic, tokens - 1, now_s)
    recorded = _recorded_until(world, reach)
    reach = max(recorded, reach // fleet.tier_span * fleet.tier_span)
    moved = reach - cached
    if moved < fleet.tier_span:
        world.replicas.link_free_s[replica] = begin + fleet.tier_latency_s
        requests.ready_s[request] = requests.lands_s[request] = min(begin, patient_until)
        return
    begin = max(begin, totals.link_free_s[0])
    totals.link_free_s[0] = begin + moved * fleet.tier_shared_token_s
    lands_s = begin + fleet.tier_latency_s + moved * fleet.tier_token_s
    world.replicas.link_free_s[replica] = requests.lands_s[request] = lands_s
    requests.ready_s[request] = min(lands_s, patient_until)
    requests.fetched[request], requests.landed[request] = cached, reach
    requests.recorded[request] = recorded


@compiled
def restore(world: World, traffic: Asked, fleet: Fleet, unit: int, request: int) -> int:
    """Hang the fetched tokens below the locked unit that a request has matched: whole turns
    compressed as they had been, the rest exact. The slots of all were reserved. Returns the unit
    that the request goes on from, locked."""
    reach, recorded = world.requests.landed[request], world.requests.recorded[request]
    set_path(world, traffic, traffic.asks.node[request])
    deepest = unit
    if recorded > world.units.stop[unit]:
        deepest = append(world, traffic, unit, recorded, recorded, recorded)
        turn = deepest
        while fleet.compresses and turn != unit:
            compress(world, fleet, turn)
            turn = world.units.parent[turn]
    if reach > world.units.stop[deepest]:
        deepest = append(world, traffic, deepest, reach, reach, reach)
    return deepest

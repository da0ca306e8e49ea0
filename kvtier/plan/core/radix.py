"""A replica's radix tree, matched, cut and grown: SGLang's, with the variants of kvtier's.

A compressed unit of competing heads that nobody uses is cut where a request leaves it, a window
before that place. A unit of a head profile cannot be cut inside what was dropped: a request that
leaves it there uses the tokens before. The tokens that the request computes become a variant. The
place where it left is a boundary of the variant, so that the next request that leaves there shares
it. This is a model of `kvtier_sglang.radix.tree` and `.matching`.
"""

from __future__ import annotations

import numpy as np

from kvtier.plan.core.compiled import compiled
from kvtier.plan.core.state import NONE, Asked, Fleet, World
from kvtier.plan.core.units import attach, detach, first_child, new_unit, put_newest
from kvtier.retention.locality import CUT_WINDOW, LEAST_CUT, SMALL_SHARE, WIDE_CUT_WINDOW
from kvtier.retention.shares.base import PAGE

# A new path is cut into so many units at most.
MOST_CUTS = 32


@compiled
def set_path(world: World, traffic: Asked, node: int) -> None:
    """Make the way to a node the path at hand; behind its end there is nothing."""
    behind = traffic.nodes.depth[node] + 1
    while world.path[behind] != NONE:
        world.path[behind] = NONE
        behind += 1
    while node != NONE:
        world.path[traffic.nodes.depth[node]] = node
        node = traffic.nodes.parent[node]


@compiled
def node_at(world: World, traffic: Asked, position: int) -> int:
    """Return the node of the path at hand that has the token at a position; NONE behind its end."""
    depth = 0
    while world.path[depth] != NONE:
        if position < traffic.nodes.stop[world.path[depth]]:
            return world.path[depth]
        depth += 1
    return NONE


@compiled
def shared(world: World, traffic: Asked, unit: int, limit: int) -> int:
    """Return the number of leading tokens, `limit` at most, on which the path at hand agrees with
    the path to a unit."""
    node = world.units.node[unit]
    while node != NONE:
        if world.path[traffic.nodes.depth[node]] == node:
            return min(traffic.nodes.stop[node], world.units.known[unit], limit)
        node = traffic.nodes.parent[node]
    return 0


@compiled
def usable(world: World, fleet: Fleet, unit: int, upto: int, exact_only: bool) -> int:
    """Return the position up to which a unit can be used, where it agrees up to `upto`.
    exact_only: dropped tokens are not used."""
    units = world.units
    begin, end = units.drop_begin[unit], units.drop_end[unit]
    if end == begin:
        return upto
    whole = upto == units.stop[unit] or upto >= end + fleet.branch_recent
    if whole and not exact_only:
        return upto
    if fleet.ca_share == 1 and units.locks[unit] == 0 and upto > begin and not exact_only:
        kept = kept_of_dropped(world, unit) // PAGE * fleet.page
        is_small = kept < SMALL_SHARE * (end - begin)
        at = min(upto - (WIDE_CUT_WINDOW if is_small else CUT_WINDOW), end)
        if at >= begin + LEAST_CUT:
            return at
    return min(upto, begin)


@compiled
def kept_of_dropped(world: World, unit: int) -> int:
    """Return the number of slots that hold the kept entries of a unit's dropped span."""
    units = world.units
    dropped = units.drop_end[unit] - units.drop_begin[unit]
    return units.slots[unit] - (units.stop[unit] - units.start[unit] - dropped)


@compiled
def walk(
    world: World,
    traffic: Asked,
    fleet: Fleet,
    unit: int,
    limit: int,
    exact_only: bool,
    cut: bool,
) -> tuple[int, int]:
    """Follow the path at hand from a unit's end as far as units allow, up to `limit`.

    exact_only: dropped tokens are not used; cut: the last unit is cut where it is left inside.
    Returns the last unit and the position reached.
    """
    units = world.units
    position = units.stop[unit]
    while position < limit:
        node = node_at(world, traffic, position)
        if node == NONE:
            break
        best, reach = NONE, position
        child = first_child(world, unit, node)
        while child != NONE:
            upto = usable(world, fleet, child, shared(world, traffic, child, limit), exact_only)
            if upto > reach:
                best, reach = child, upto
            child = units.sibling[child]
        if best == NONE:
            break
        position = reach
        if reach < units.stop[best]:
            unit = split(world, traffic, best, reach) if cut else best
            break
        unit = best
    return unit, position


@compiled
def split(world: World, traffic: Asked, lower: int, at: int) -> int:
    """Cut a unit at a position within it. Returns the new upper part, whose end is a boundary from
    now on."""
    units = world.units
    parent, key_node = units.parent[lower], units.key_node[lower]
    detach(world, lower)
    upper = new_unit(world, units.replica[lower])
    units.start[upper], units.stop[upper], units.known[upper] = units.start[lower], at, at
    units.prompt[upper] = units.prompt[lower]
    node = units.node[lower]
    while traffic.nodes.start[node] > at:
        node = traffic.nodes.parent[node]
    behind = node if at < units.known[lower] else NONE
    if traffic.nodes.start[node] == at:
        node = traffic.nodes.parent[node]
    units.node[upper] = node
    units.compressed[upper], units.branch[upper] = units.compressed[lower], True
    slots = at - units.start[lower]
    begin, end = units.drop_begin[lower], units.drop_end[lower]
    if begin < at < end:
        kept = kept_of_dropped(world, lower) * (at - begin) // (end - begin)
        slots = begin - units.start[lower] + kept
        units.drop_begin[upper], units.drop_end[upper] = begin, at
        units.drop_begin[lower] = at
    elif begin < end <= at:
        slots = units.slots[lower] - (units.stop[lower] - at)
        units.drop_begin[upper], units.drop_end[upper] = begin, end
        units.drop_begin[lower] = units.drop_end[lower] = 0
    units.slots[upper] = slots
    units.slots[lower] -= slots
    units.start[lower] = at
    units.locks[upper] = units.locks[lower]
    attach(world, upper, parent, key_node)
    attach(world, lower, upper, behind)
    if units.locks[upper] == 0:
        put_newest(units, world.replicas, units.replica[upper], upper)
    return upper


@compiled
def append(world: World, traffic: Asked, parent: int, stop: int, known: int, prompt: int) -> int:
    """Hang the path at hand below a unit, from its end up to `stop`. The new units are locked, and
    cut where the path leaves units that are there already. Returns the deepest."""
    units = world.units
    position = units.stop[parent]
    cuts = _cuts(world, traffic, parent, position, stop)
    for end in cuts:
        if end <= position:
            continue
        unit = new_unit(world, units.replica[parent])
        units.start[unit], units.stop[unit] = position, end
        units.known[unit] = max(min(end, known), position)
        units.prompt[unit] = prompt
        units.node[unit] = node_at(world, traffic, max(min(end, known) - 1, 0))
        units.branch[unit] = end < stop
        units.slots[unit] = end - position
        units.locks[unit] = 1
        units.newer[unit] = units.older[unit] = NONE
        attach(world, unit, parent, node_at(world, traffic, position) if position < known else NONE)
        parent, position = unit, end
    return parent


@compiled
def _cuts(world: World, traffic: Asked, parent: int, position: int, stop: int) -> np.ndarray:
    """Return, in order, the positions where the path leaves the children of a unit that begin as it
    does, and `stop`. position: the unit's end."""
    cuts = np.full(MOST_CUTS, stop, np.int64)
    node = node_at(world, traffic, position)
    if node == NONE:
        return cuts[:1]
    count = 1
    child = first_child(world, parent, node)
    while child != NONE and count < MOST_CUTS:
        upto = shared(world, traffic, child, stop)
        if position < upto < stop:
            cuts[count] = upto
            count += 1
        child = world.units.sibling[child]
    return np.sort(cuts[:count])

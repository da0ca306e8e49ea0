"""Slots and recency of a replica's cached units.

Units that no request has locked are in their replica's order of use, newest first. A path is put in
from its end to its beginning, so that a unit is always newer than its children and the oldest is
always a leaf, as SGLang evicts.
"""

from __future__ import annotations

from kvtier.plan.core.compiled import compiled
from kvtier.plan.core.state import NONE, Fleet, Records, World


@compiled
def take_out(table: Records, ends: Records, at: int, one: int) -> None:
    """Take a record of a table out of an order of use, whose ends are those of record `at`."""
    newer, older = table.newer[one], table.older[one]
    if newer == NONE:
        ends.newest[at] = older
    else:
        table.older[newer] = older
    if older == NONE:
        ends.oldest[at] = newer
    else:
        table.newer[older] = newer
    table.newer[one] = table.older[one] = NONE


@compiled
def put_newest(table: Records, ends: Records, at: int, one: int) -> None:
    """Put a record into an order of use, at its newer end."""
    first = ends.newest[at]
    table.newer[one], table.older[one] = NONE, first
    if first == NONE:
        ends.oldest[at] = one
    else:
        table.newer[first] = one
    ends.newest[at] = one


@compiled
def lock_path(world: World, unit: int) -> None:
    """Lock the path to a unit for a request: its units cannot be evicted meanwhile."""
    units, replicas = world.units, world.replicas
    root = units.replica[unit]
    while unit != root:
        if units.locks[unit] == 0:
            take_out(units, replicas, root, unit)
            replicas.evictable[root] -= units.slots[unit]
        units.locks[unit] += 1
        unit = units.parent[unit]


@compiled
def unlock_path(world: World, unit: int) -> None:
    """Unlock the path to a unit for a request; units that nobody else uses become the newest."""
    units, replicas = world.units, world.replicas
    root = units.replica[unit]
    while unit != root:
        units.locks[unit] -= 1
        if units.locks[unit] == 0:
            put_newest(units, replicas, root, unit)
            replicas.evictable[root] += units.slots[unit]
        unit = units.parent[unit]


@compiled
def child_key(world: World, parent: int, node: int) -> int:
    """Return the key in `children` of the units below a parent that begin within a node."""
    return parent * len(world.kept) + node


@compiled
def first_child(world: World, parent: int, node: int) -> int:
    """Return the first of the variants below a parent that begin within a node, or NONE."""
    key = child_key(world, parent, node)
    if key in world.children:
        return world.children[key]
    return NONE


@compiled
def attach(world: World, unit: int, parent: int, node: int) -> None:
    """Make a unit a child of `parent` that begins within `node`. A unit with a node of NONE cannot
    be found again, as its tokens are unique."""
    units = world.units
    units.parent[unit], units.key_node[unit], units.sibling[unit] = parent, node, NONE
    units.children[parent] += 1
    if node != NONE:
        units.sibling[unit] = first_child(world, parent, node)
        world.children[child_key(world, parent, node)] = unit


@compiled
def detach(world: World, unit: int) -> None:
    """Undo `attach`."""
    units = world.units
    parent, node = units.parent[unit], units.key_node[unit]
    units.children[parent] -= 1
    if node == NONE:
        return
    key = child_key(world, parent, node)
    first = world.children[key]
    if first == unit:
        if units.sibling[unit] == NONE:
            del world.children[key]
        else:
            world.children[key] = units.sibling[unit]
        return
    while units.sibling[first] != unit:
        first = units.sibling[first]
    units.sibling[first] = units.sibling[unit]


@compiled
def new_unit(world: World, replica: int) -> int:
    """Return a unit that is nowhere yet. `loop` stops in time for there to be one."""
    units = world.units
    world.totals.free_units[0] -= 1
    unit = world.free[world.totals.free_units[0]]
    units.replica[unit] = replica
    units.children[unit] = units.locks[unit] = 0
    units.drop_begin[unit] = units.drop_end[unit] = 0
    units.compressed[unit] = units.branch[unit] = False
    return unit


@compiled
def _least_wanted(world: World, replica: int) -> int:
    """Return the unlocked leaf whose session has the lowest priority, of equal ones the one used
    least recently."""
    units, found, least = world.units, NONE, 0.0
    unit = world.replicas.oldest[replica]
    while unit != NONE:
        if units.children[unit] == 0:
            priority = world.hints.priority[world.owner[units.node[unit]]]
            if found == NONE or priority < least:
                found, least = unit, priority
        unit = units.newer[unit]
    return found


@compiled
def evict(world: World, fleet: Fleet, replica: int) -> None:
    """Evict the unit that was used least recently, or, with hints, the one that is wanted least."""
    units, replicas = world.units, world.replicas
    unit = _least_wanted(world, replica) if fleet.hinted else replicas.oldest[replica]
    take_out(units, replicas, replica, unit)
    detach(world, unit)
    replicas.used[replica] -= units.slots[unit]
    replicas.evictable[replica] -= units.slots[unit]
    replicas.evicted[replica] += units.stop[unit] - units.start[unit]
    free_unit(world, unit)


@compiled
def free_unit(world: World, unit: int) -> None:
    """Let a unit that is nowhere any more be a new one."""
    world.units.replica[unit] = NONE
    world.free[world.totals.free_units[0]] = unit
    world.totals.free_units[0] += 1


@compiled
def merge_upwards(world: World, unit: int) -> None:
    """Merge an unlocked unit with those before it that are of its turn: uncompressed, no boundary,
    and used by nobody else. The unit keeps its place in the order of use."""
    units = world.units
    root, parent = units.replica[unit], units.parent[unit]
    while (
        parent != root
        and not units.compressed[parent]
        and not units.branch[parent]
        and units.locks[parent] == 0
        and units.children[parent] == 1
    ):
        before, key_node = units.parent[parent], units.key_node[parent]
        detach(world, unit)
        detach(world, parent)
        units.start[unit] = units.start[parent]
        units.slots[unit] += units.slots[parent]
        attach(world, unit, before, key_node)
        take_out(units, world.replicas, root, parent)
        free_unit(world, parent)
        parent = before


@compiled
def reserve(world: World, fleet: Fleet, replica: int, slots: int) -> bool:
    """Take slots, and evict as many units as that needs. Returns False, with nothing taken, where
    running requests leave too few."""
    replicas = world.replicas
    if replicas.used[replica] + slots - fleet.slots > replicas.evictable[replica]:
        return False
    while replicas.used[replica] + slots > fleet.slots:
        evict(world, fleet, replica)
    replicas.used[replica] += slots
    replicas.peak[replica] = max(replicas.peak[replica], replicas.used[replica])
    return True

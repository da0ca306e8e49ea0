"""The simulator's state. Times are in seconds, lengths in tokens, memory in slots.

A slot holds one token's KV. A turn that has ended and was compressed takes fewer slots than it has
tokens.

A *unit* is a node of a replica's radix tree. Its tokens are known as far as `known`: they are those
of the traffic's tree on the path to `node`. Tokens behind that can be shared by no other request.

    unit       [ start | drop_begin … drop_end |  known | … stop )
                         of which a part is kept when its turn has ended

Tables are arrays of records, because a compiled function is handed every array of its arguments one
by one. A table of twenty fields is one argument, and the fields of a record are side by side in
memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types
from numba.typed import Dict

from kvtier.traffic.prefixes import Traffic

Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]
Records = np.recarray[Any, Any]

NONE = -1
IDLE, PREFILLING, DECODING, WAITING = 0, 1, 2, 3


# These are places in kvtier.plan.fleet.STREAMING, of which the first is "never".
AUTO, ALWAYS = 1, 2


class Fleet(NamedTuple):
    """The fleet that is simulated: numbers alone, as the compiled loop takes them.
    kvtier.plan.simulate makes it of a plan; kvtier.plan.fleet says units and sources.

    compresses: `retention` of a turn that has ended is kept
    streams:    a place in STREAMING: which prompts are compressed while they are prefilled
    routing:    a place in ROUTINGS
    longest_first: the waiting request with the longest cached prefix is admitted first
    hinted:     there are hints of sessions
    in_flight_slots: slots that requests in flight may hold while another runs
    tier_tokens: 0 where there is no tier; tier_span: fewer missing tokens are not asked for
    """

    replicas: int
    slots: int
    compresses: bool
    streams: int
    sink: int
    recent: int
    branch_recent: int
    recent_of: int
    retention: float
    page: int
    ca_share: float
    in_flight_slots: int
    chunk: int
    max_running: int
    prefill_base_s: float
    prefill_request_s: float
    prefill_prompt_token_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_base_s: float
    decode_request_s: float
    decode_token_s: float
    tier_tokens: int
    tier_span: int
    tier_latency_s: float
    tier_token_s: float
    tier_shared_token_s: float
    tier_write_token_s: float
    tier_spill_token_s: float
    routing: int
    routing_slack: int
    longest_first: bool
    hinted: bool


# In all tables, fields that number something begin with NONE, and times that are not known yet
# with nan (`_table`).
_ASKS = {
    "arrival_s": "f8", "think_s": "f8", "next_request": "i4", "session": "i4", "node": "i4",
    "input_tokens": "i4", "output_tokens": "i4", "out_node": "i4", "out_known": "i4",
}  # fmt: skip
_NODES = {"parent": "i4", "start": "i4", "stop": "i4", "depth": "i4"}


class Asked(NamedTuple):
    """The traffic, as `kvtier.traffic.prefixes.Traffic` says it: a table of requests (`asks`) and
    one of nodes."""

    asks: Records
    nodes: Records


def asked(traffic: Traffic) -> Asked:
    """Return the traffic as tables."""
    tables = []
    for layout in (_ASKS, _NODES):
        table = _table(len(getattr(traffic, next(iter(layout)))), layout)
        for name in layout:
            table[name] = getattr(traffic, name)
        tables.append(table)
    return Asked(*tables)


# The fields of a request. replica: the one that it went to; hit_device, hit_tier: tokens that were
# not computed. A request that fits no replica is refused; its first_s and finish_s stay nan. The
# other fields serve while it is there. follows: the one behind it in the queue; ready_s: the end of
# its wait for the tier; lands_s: the time when the tier has answered; cached: the tokens that its
# replica had when the tier was asked last; fetched, landed: the tokens before and up to the end of
# the answer; recorded: the end of the whole turns in that; anchor: the unit that it goes on from;
# own: its own unit; left, chunk, restored: tokens left to compute, in the pass under way, and
# restored; reserved: slots that it has beside its units'; reads: tokens that attention reads;
# target: the decode step that ends it; streams: whether its prompt is compressed as it comes.
_REQUESTS = {
    "arrived_s": "f8", "first_s": "f8", "finish_s": "f8", "replica": "i4", "hit_device": "i4",
    "hit_tier": "i4", "refused": "?", "follows": "i4", "ready_s": "f8", "lands_s": "f8",
    "cached": "i4", "fetched": "i4", "landed": "i4", "recorded": "i4", "anchor": "i4",
    "own": "i4", "left": "i4", "chunk": "i4", "restored": "i4", "reserved": "i4",
    "reads": "f8", "target": "i8", "streams": "?",
}  # fmt: skip
# The fields of a unit; the root of replica i is unit i. sibling: the next variant of the same
# parent that begins within the same node, key_node; prompt: the end of the prompt of the request
# that computed it, as the rest was generated; newer, older: neighbours in its replica's order of
# use, for units that nothing has locked.
_UNITS = {
    "parent": "i4", "sibling": "i4", "key_node": "i4", "node": "i4", "start": "i4", "known": "i4",
    "stop": "i4", "prompt": "i4", "drop_begin": "i4", "drop_end": "i4", "compressed": "?",
    "branch": "?", "children": "i4", "locks": "i4", "slots": "i4", "newer": "i4",
    "older": "i4", "replica": "i4",
}  # fmt: skip
# The fields of a replica. used: slots of its units and of running requests; evictable: slots of
# units that no request has locked; chunked: the request whose prompt is partly computed; steps:
# decode steps so far; compute_rate, load_rate: tokens/s as measured, 0 before; loaded_s: the time
# when loading was last measured.
_REPLICAS = {
    "phase": "i4", "phase_began_s": "f8", "phase_steps": "i8", "used": "i8",
    "evictable": "i8", "peak": "i8",
    "newest": "i4", "oldest": "i4", "queue_first": "i4", "queue_last": "i4", "outstanding": "i4",
    "chunked": "i4", "num_batch": "i4", "num_running": "i4", "steps": "i8", "reads": "f8",
    "link_free_s": "f8", "evicted": "i8", "compute_rate": "f8", "load_rate": "f8",
    "loaded_s": "f8",
}  # fmt: skip
# The fields of a node of the traffic. held: tokens that the tier holds of it, from since_s on;
# turn_end: the end of a turn that the tier knows whole, if one ends in it; newer, older: neighbours
# in the tier's order of use; home: the replica that served it last.
_KEPT = {
    "held": "i4",
    "turn_end": "i4",
    "since_s": "f8",
    "newer": "i4",
    "older": "i4",
    "home": "i4",
}
# The totals. held, evicted: tokens that the tier holds and has evicted; newest, oldest: the ends of
# its order of use; link_free_s: the time when its link is free; free_units: unused units; arrivals:
# those taken so far; turn: the round robin's place.
_TOTALS = {
    "held": "i8", "evicted": "i8", "newest": "i4", "oldest": "i4", "link_free_s": "f8",
    "free_units": "i8", "arrivals": "i8", "turn": "i8",
}  # fmt: skip
# The fields of a session's hints; the last record is for what several share (kvtier.plan.hints).
_HINTS = {"priority": "f8", "retention": "f8"}


class World(NamedTuple):
    """The tables and arrays that change.

    requests, units, replicas, kept: see the layouts above; totals: one record
    children: the first unit by parent unit and node; free: unused units, the first
              totals.free_units of them
    path:     nodes of the request at hand, by depth
    batch, running: requests of each replica, [replicas, max_running]
    events, loads: trees of `clocks` over replicas: the next event in s, and the requests there
    waits:    such a tree over sessions: the time when the next turn comes
    waiting:  the request of that turn, by session
    hints, owner, away_s: by session, node and request; of length 1 where there are no hints
    """

    requests: Records
    units: Records
    replicas: Records
    kept: Records
    totals: Records
    children: Any
    free: Int32
    path: Int32
    batch: Int32
    running: Int32
    events: Float64
    loads: Float64
    waits: Float64
    waiting: Int32
    hints: Records
    owner: Int32
    away_s: Float64


def new_world(fleet: Fleet, traffic: Traffic, units: int) -> World:
    """Return an empty fleet. units: its room for units beside the replicas' roots, at first."""
    r = fleet.replicas
    made = _table(units + r, _UNITS)
    made.replica[:r] = np.arange(r)
    totals = _table(1, _TOTALS)
    totals.free_units[0] = units
    totals.link_free_s[0] = 0
    # Only turns that wait for earlier ones need a place per session.
    sessions = traffic.num_sessions if (traffic.next_request >= 0).any() else 1
    return World(
        requests=_table(traffic.num_requests, _REQUESTS),
        units=made,
        replicas=_table(r, _REPLICAS),
        kept=_table(len(traffic.parent), _KEPT),
        totals=totals,
        children=Dict.empty(types.int64, types.int32),
        free=np.arange(units + r - 1, -1, -1, dtype=np.int32),
        path=np.full(int(traffic.depth.max()) + 2, NONE, np.int32),
        batch=np.full((r, fleet.max_running), NONE, np.int32),
        running=np.full((r, fleet.max_running), NONE, np.int32),
        events=_tournament(np.full(r, np.inf)),
        loads=_tournament(np.zeros(r)),
        waits=_tournament(np.full(sessions, np.inf)),
        waiting=np.full(sessions, NONE, np.int32),
        hints=_table(1, _HINTS),
        owner=np.zeros(1, np.int32),
        away_s=np.zeros(1),
    )


def with_hints(
    world: World, priority: Float64, retention: Float64, away_s: Float64, owner: Int32
) -> World:
    """Return the same world with hints, as `kvtier.plan.hints` says them."""
    hints = _table(len(priority), _HINTS)
    hints.priority, hints.retention = priority, retention
    return world._replace(hints=hints, owner=owner, away_s=away_s)


def with_more_units(world: World) -> World:
    """Return the same world with twice the room for units."""
    before = len(world.units)
    more = _table(2 * before, _UNITS)
    more[:before] = world.units
    count = int(world.totals.free_units[0])
    fresh = np.arange(2 * before - 1, before - 1, -1, dtype=np.int32)
    free = np.zeros(2 * before, np.int32)
    free[: count + before] = np.concatenate([world.free[:count], fresh])
    world.totals.free_units[0] = count + before
    return world._replace(units=more, free=free)


# The first are fields that number something, the second times that are not known at first.
_NOTHING = {
    *("parent", "sibling", "key_node", "node", "newer", "older", "replica", "newest", "oldest"),
    *("queue_first", "queue_last", "chunked", "follows", "anchor", "own", "home"),
}
_UNKNOWN = {"arrived_s", "first_s", "finish_s"}


def _table(count: int, layout: dict[str, str]) -> Records:
    table = np.zeros(count, list(layout.items())).view(np.recarray)
    for name in layout:
        if name in _NOTHING:
            table[name] = NONE
        elif name in _UNKNOWN:
            table[name] = np.nan
    return table


def _tournament(values: Float64) -> Float64:
    half = 1 << max(1, (len(values) - 1).bit_length())
    tree = np.full(2 * half, np.inf)
    tree[half : half + len(values)] = values
    for at in range(half - 1, 0, -1):
        tree[at] = min(tree[2 * at], tree[2 * at + 1])
    return tree

"""Traffic as arrays over one tree of prefixes, which the simulator of a fleet reads.

    nodes      0:[0,512) ─┬─ 1:[512,1024) ── 2:[1024,1300)     each: parent, tokens [start, stop)
                          └─ 3:[512,800)
    request    ends in node 2, after 1200 tokens of input; its answer goes on to 1300, in node 2

Two requests begin alike as far as the paths to their last nodes agree. A node is a block of a
trace, or the tokens that one turn of a described session adds. Lengths are in tokens, times in
seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.traffic.continuations import Continuations, find_continuations, sessions_of
from kvtier.traffic.trace import Trace

Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]


class Traffic(NamedTuple):
    """The arrays of the module docstring, `[requests]` and, from `parent` on, `[nodes]`.

    arrival_s:    the request's arrival; infinite where it waits for an earlier turn's end
    think_s:      the time from that end to its arrival
    next_request: the request that waits for this one's end, or -1
    session:      the number of the request's session
    node:         the last node of the input
    input_tokens, output_tokens: the request's lengths
    out_node:     the last node of input and answer, as far as the tree has them
    out_known:    the tokens up to there: the rest of the answer is in no other request
    parent:       the node before a node, or -1
    start, stop:  a node's tokens, [start, stop)
    depth:        the number of nodes before a node
    """

    arrival_s: Float64
    think_s: Float64
    next_request: Int32
    session: Int32
    node: Int32
    input_tokens: Int32
    output_tokens: Int32
    out_node: Int32
    out_known: Int32
    parent: Int32
    start: Int32
    stop: Int32
    depth: Int32

    @property
    def num_requests(self) -> int:
        return len(self.arrival_s)

    @property
    def num_sessions(self) -> int:
        return int(self.session.max()) + 1


def traffic_of(
    trace: Trace, *, answers_continue: bool = True, links: Continuations | None = None
) -> Traffic:
    """Return a trace's traffic. Requests come at their own times, whatever became of earlier ones;
    only those with a delay wait for an answer.

    answers_continue: whether the request that continues another begins with the answer that was
                      given, as in a real conversation; a replay's prompts know nothing of answers
    links:            the trace's continuations; None: they are found (`find_continuations`)
    """
    links = links or find_continuations(trace)
    numbers: dict[int, int] = {}
    parent: list[int] = []
    start: list[int] = []
    stop: list[int] = []
    paths: list[list[int]] = []
    for request in trace.requests:
        path: list[int] = []
        for place, one in enumerate(links.blocks(request)):
            begin = place * trace.block_tokens
            end = min(begin + trace.block_tokens, request.input_tokens)
            node = numbers.setdefault(one, len(numbers))
            if node == len(parent):
                parent.append(path[-1] if path else -1)
                start.append(begin)
                stop.append(end)
            stop[node] = max(stop[node], end)
            path.append(node)
        paths.append(path)
    inputs = [request.input_tokens for request in trace.requests]
    outputs = [request.output_tokens for request in trace.requests]
    out_node, out_known = [path[-1] for path in paths], list(inputs)
    if answers_continue:
        for index, later in links.next_request.items():
            # The last generated token has no KV.
            out_known[index] = inputs[index] + outputs[index] - 1
            out_node[index] = paths[later][(out_known[index] - 1) // trace.block_tokens]
    before = trace.before()
    after = {index: one for one, index in enumerate(before) if index is not None}
    comes = [
        request.arrival_s if index is None else np.inf
        for request, index in zip(trace.requests, before, strict=True)
    ]
    return Traffic(
        arrival_s=np.array(comes, np.float64),
        think_s=np.array([request.delay_s or 0.0 for request in trace.requests], np.float64),
        next_request=_int32([after.get(index, -1) for index in range(len(inputs))]),
        session=_int32(sessions_of(trace, links)),
        node=_int32([path[-1] for path in paths]),
        input_tokens=_int32(inputs),
        output_tokens=_int32(outputs),
        out_node=_int32(out_node),
        out_known=_int32(out_known),
        parent=_int32(parent),
        start=_int32(start),
        stop=_int32(stop),
        depth=_int32(start) // np.int32(trace.block_tokens),
    )


def copies(traffic: Traffic, count: int, spread_s: float, seed: int) -> Traffic:
    """Return `count` copies of the traffic, of users who share nothing between copies. Each copy is
    shifted by a time drawn from [0, spread_s), so that bursts of the recording do not coincide."""
    rng = np.random.default_rng(seed)
    requests, nodes = traffic.num_requests, len(traffic.parent)
    which = np.repeat(np.arange(count, dtype=np.int32), requests)
    later = rng.uniform(0, spread_s, count)

    def shifted(values: Int32, step: int) -> Int32:
        many = np.tile(values, count)
        each = np.repeat(np.arange(count, dtype=np.int32), len(values))
        return np.where(many < 0, many, many + each * np.int32(step)).astype(np.int32)

    steps = {
        "next_request": requests, "session": traffic.num_sessions,
        "node": nodes, "out_node": nodes, "parent": nodes,
    }  # fmt: skip
    many: dict[str, Any] = {
        name: shifted(values, steps[name]) if name in steps else np.tile(values, count)
        for name, values in traffic._asdict().items()
    }
    return Traffic(**many)._replace(arrival_s=many["arrival_s"] + later[which])


def _int32(values: Sequence[int]) -> Int32:
    return np.array(values, np.int32)

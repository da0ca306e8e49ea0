"""Continuations: the requests that go on with earlier ones, as far as a trace tells.

A trace names whole blocks. The end of a request, in a block that is partly filled, has an id of its
own, and the next turn, which goes on in the middle of that block, has another:

    turn 1     [ 0 ][ 7 ][ 8 ][ 9 ·· ]            9: partly filled
    turn 2     [ 0 ][ 7 ][ 8 ][ 12    ][ 13 ]     12 begins with what 9 holds, then with the answer

Taken literally, no turn would continue the one before. So a request is taken to continue an earlier
one under three conditions: it shares all of that one's whole blocks, at least two; it is long
enough to hold that one with its answer; and it is the first to go on behind them with a new block.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.traffic.trace import Trace, TraceRequest

# Fewer shared blocks are a system prompt that strangers share, rather than a conversation.
LEAST_SHARED_BLOCKS = 2


@dataclass(frozen=True)
class Continuations:
    """The requests of a trace that continue others, and their blocks that begin alike.

    next_request: maps a request to the one that continues it, both by their places in the trace
    same_block:   maps the id of a partly filled block to the id of the block that begins with its
                  tokens, which is never an id that is itself replaced
    """

    next_request: dict[int, int]
    same_block: dict[int, int]

    def blocks(self, request: TraceRequest) -> list[int]:
        """Return a request's ids, the last replaced by that of the block that begins with it."""
        *whole, last = request.block_ids
        return [*whole, self.same_block.get(last, last)]


def find_continuations(trace: Trace) -> Continuations:
    """Find the continuations of a trace, under the conditions of the module docstring."""
    next_request: dict[int, int] = {}
    same_block: dict[int, int] = {}
    seen: set[int] = set()
    # Keys are last whole blocks; values, the newest request with a partly filled block behind it.
    ends: dict[int, int] = {}
    for index, request in enumerate(trace.requests):
        before = _continued(trace, request, ends, seen)
        if before is not None:
            place = trace.whole_blocks(trace.requests[before])
            next_request[before] = index
            same_block[trace.requests[before].block_ids[-1]] = request.block_ids[place]
        seen.update(request.block_ids)
        whole = trace.whole_blocks(request)
        if LEAST_SHARED_BLOCKS <= whole < len(request.block_ids):
            ends[request.block_ids[whole - 1]] = index
    return Continuations(next_request, _resolved(same_block))


def sessions_of(trace: Trace, links: Continuations | None = None) -> list[int]:
    """Return the number of each request's session, `[requests]`.

    A session is told by its name. A request without one is in the session of the request that it
    continues, or in a session of its own. links: the trace's continuations; None: they are found.
    """
    following = {
        later: index for index, later in (links or find_continuations(trace)).next_request.items()
    }
    named: dict[str, int] = {}
    found: list[int] = []
    fresh = 0
    for index, request in enumerate(trace.requests):
        name, number = request.session, fresh
        if name is not None:
            number = named.setdefault(name, fresh)
        elif index in following:
            number = found[following[index]]
        found.append(number)
        fresh = max(fresh, number + 1)
    return found


def _continued(
    trace: Trace, request: TraceRequest, ends: dict[int, int], seen: set[int]
) -> int | None:
    """Return the place of the request that this one continues, the one that shares most blocks with
    it, and take it from `ends`; None where there is none."""
    for place in range(len(request.block_ids) - 1, LEAST_SHARED_BLOCKS - 1, -1):
        index = ends.get(request.block_ids[place - 1])
        if index is None or request.block_ids[place] in seen:
            continue
        earlier = trace.requests[index]
        if request.input_tokens >= earlier.input_tokens + earlier.output_tokens:
            del ends[request.block_ids[place - 1]]
            return index
    return None


def _resolved(same_block: dict[int, int]) -> dict[int, int]:
    """Follow chains to their ends: a block that continues another may be partly filled itself."""
    resolved: dict[int, int] = {}
    for first in same_block:
        last = first
        while last in same_block:
            last = same_block[last]
        resolved[first] = last
    return resolved

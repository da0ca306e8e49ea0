"""Which request goes on with which conversation, as far as a trace tells.

A trace names whole blocks. The end of a request, in a block that is partly filled, has an id of its
own, and the next turn, which goes on in the middle of that block, has another:

    turn 1     [ 0 ][ 7 ][ 8 ][ 9 ·· ]            9: partly filled
    turn 2     [ 0 ][ 7 ][ 8 ][ 12    ][ 13 ]     12 begins with what 9 holds, then with the answer

Taken literally no turn would go on with the one before. A request is taken to continue an earlier
one where it shares all of its whole blocks, at least two, is long enough to hold it with its
answer, and is the first to go on behind them with a new block.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.traffic.trace import Trace, TraceRequest

# Fewer are a system prompt that strangers share, rather than a conversation.
LEAST_SHARED_BLOCKS = 2


@dataclass(frozen=True)
class Continuations:
    """What is taken to continue what.

    next_request: for a request the one that goes on with it, both by their places in the trace
    same_block:   for the id of a partly filled block the id of that which begins with its tokens;
                  never an id that is itself replaced
    """

    next_request: dict[int, int]
    same_block: dict[int, int]

    def blocks(self, request: TraceRequest) -> list[int]:
        """A request's ids, where the last stands for the block that it is the beginning of."""
        *whole, last = request.block_ids
        return [*whole, self.same_block.get(last, last)]


def find_continuations(trace: Trace) -> Continuations:
    """See the module docstring."""
    next_request: dict[int, int] = {}
    same_block: dict[int, int] = {}
    seen: set[int] = set()
    # By the last whole block: the newest request that ends in a partly filled one behind it.
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
    """Of each request the number of its session: by its name, or where it has none that of what it
    goes on with. links: what `find_continuations` says, if that is known."""
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
    """The request that this one goes on with: that which shares most with it."""
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
    """Chains followed to their ends: a block that continues one may be partly filled itself."""
    resolved: dict[int, int] = {}
    for first in same_block:
        last = first
        while last in same_block:
            last = same_block[last]
        resolved[first] = last
    return resolved


__all__ = ["Continuations", "find_continuations", "sessions_of"]

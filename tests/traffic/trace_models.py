"""Small traces in Mooncake's format, made from a seed; and caches written as simply as can be."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path

from kvtier.traffic.trace import BLOCK_TOKENS, Trace, TraceRequest


def make_trace(seed: int, conversations: int = 8, turns: int = 3, gap_s: float = 1.0) -> Trace:
    """Conversations behind one shared block; every turn holds the one before with its answer."""
    rng = random.Random(seed)
    fresh = iter(range(1, 1 << 30))
    arrivals: list[TraceRequest] = []
    for _ in range(conversations):
        at, tokens, whole = rng.uniform(0, conversations * gap_s), 0, [0]
        for _ in range(rng.randint(1, turns)):
            tokens += rng.randint(2 * BLOCK_TOKENS, 5 * BLOCK_TOKENS)
            output = rng.randint(1, BLOCK_TOKENS)
            while len(whole) < tokens // BLOCK_TOKENS:
                whole.append(next(fresh))
            last = [next(fresh)] if tokens % BLOCK_TOKENS else []
            arrivals.append(TraceRequest(round(at, 3), tokens, output, (*whole, *last)))
            tokens += output
            at += rng.uniform(0, 4 * gap_s)
    return Trace(tuple(sorted(arrivals, key=lambda one: one.arrival_s)))


def write_trace(file: Path, trace: Trace) -> Path:
    """A trace as a file."""
    trace.write(file)
    return file


def lru_hit_rate(trace: Trace, blocks: float) -> float:
    """Tokens that an LRU cache of so many blocks hits, over all, by the book."""
    cache: OrderedDict[int, None] = OrderedDict()
    hit = total = 0
    for request in trace.requests:
        leading = 0
        while leading < len(request.block_ids) and request.block_ids[leading] in cache:
            leading += 1
        hit += min(leading * trace.block_tokens, request.input_tokens)
        total += request.input_tokens
        for one in request.block_ids:
            cache[one] = None
            cache.move_to_end(one)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return hit / total

"""The hits of a trace in a least-recently-used cache of any size.

The cache holds whole blocks, and a request's blocks are used in the order of its prompt. A block is
a hit where it and all blocks before it are cached. LRU caches contain each other: a block is in a
cache of C blocks exactly where fewer than C other blocks were used since it was (Mattson et al.,
"Evaluation techniques for storage hierarchies", 1970). So one pass gives the rate for every size.

Output tokens are in no block of a trace, so they are neither cached nor counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.traffic.trace import Trace

# The distance of a block that was never used before.
NEVER = np.iinfo(np.int64).max


def hit_rates(trace: Trace, capacities_tokens: Sequence[float]) -> list[float]:
    """Return the share of all input tokens that a cache of each capacity hits. capacities_tokens:
    in tokens; math.inf is one, too."""
    needed, tokens = needed_blocks(trace)
    order = np.argsort(needed, kind="stable")
    hit = np.concatenate([[0], np.cumsum(tokens[order])])
    total = int(tokens.sum())
    sizes = [
        NEVER - 1 if capacity == float("inf") else int(capacity // trace.block_tokens)
        for capacity in capacities_tokens
    ]
    ends = np.searchsorted(needed[order], sizes, side="right")
    return [float(hit[end]) / total for end in ends]


def needed_blocks(trace: Trace) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return, for every block of every request, the least size of a cache that hits it and the
    block's tokens, two arrays of one length. A size is in blocks, `NEVER` where no cache hits."""
    distances = stack_distances([request.block_ids for request in trace.requests])
    needed, tokens = [], []
    for request, own in zip(trace.requests, distances, strict=True):
        # A block is useful only where all blocks before it are hit, too.
        needed.append(np.maximum.accumulate(own))
        filled = np.full(len(own), trace.block_tokens, np.int64)
        filled[-1] = request.input_tokens - (len(own) - 1) * trace.block_tokens
        tokens.append(filled)
    return np.concatenate(needed), np.concatenate(tokens)


def stack_distances(uses: Sequence[Sequence[int]]) -> list[npt.NDArray[np.int64]]:
    """Return, for each use of a block, the least size of an LRU cache that has it, or `NEVER`.

    A request's lookups come before any of its own uses: a block's size counts the distinct blocks,
    itself among them, that were used from its last use by an earlier request until this one began.
    """
    total = sum(map(len, uses))
    # A Fenwick tree over the times of uses has a one for each block's newest use.
    newest = np.zeros(total + 1, np.int64)
    last: dict[int, int] = {}
    found, now = [], 0
    for ids in uses:
        begun = now
        own = np.full(len(ids), NEVER, np.int64)
        for place, one in enumerate(ids):
            if one in last and last[one] < begun:
                own[place] = _sum(newest, begun) - _sum(newest, last[one])
        for one in ids:
            if one in last:
                _add(newest, last[one] + 1, -1)
            last[one] = now
            _add(newest, now + 1, 1)
            now += 1
        found.append(own)
    return found


def _add(tree: npt.NDArray[np.int64], at: int, value: int) -> None:
    while at < len(tree):
        tree[at] += value
        at += at & -at


def _sum(tree: npt.NDArray[np.int64], at: int) -> int:
    """Return the sum over the first `at` times."""
    total = 0
    while at > 0:
        total += int(tree[at])
        at -= at & -at
    return total

"""A tournament: a tree over numbers, one a replica or session, that knows the least of them.

    tree[1] the least of all;  tree[i] = min(tree[2i], tree[2i + 1]);  leaves from len(tree) / 2 on

It is used for the replicas' next events, for their loads and for the sessions' next turns. Ties go
to the lowest index.
"""

from __future__ import annotations

from kvtier.plan.core.compiled import compiled
from kvtier.plan.core.state import Float64


@compiled
def put(tree: Float64, index: int, value: float) -> None:
    """Change one number."""
    at = len(tree) // 2 + index
    tree[at] = value
    while at > 1:
        at //= 2
        least = min(tree[2 * at], tree[2 * at + 1])
        if tree[at] == least:
            break
        tree[at] = least


@compiled
def least(tree: Float64) -> int:
    """Return the index of the least number."""
    at, half = 1, len(tree) // 2
    while at < half:
        at = 2 * at if tree[2 * at] <= tree[2 * at + 1] else 2 * at + 1
    return at - half

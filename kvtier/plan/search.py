"""A search for the fewest replicas that meet an SLO's times.

A request that one replica cannot hold is refused by any number of them, so refusals are told and
not searched for. More replicas do not make a fleet slower, as far as routing spreads requests, so
the least number is found by doubling and halving. Each try is kept: together they are the curve
over the fleet's size.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier.errors import UsageError
from kvtier.plan.answers import Answers


def fewest_replicas(
    answer: Callable[[int], Answers], at_most: int, begin: int = 1
) -> tuple[Answers | None, list[Answers]]:
    """Return the least fleet that meets its times, or None where `at_most` replicas do not, and all
    tries by size. answer: simulates so many replicas; begin: a first guess. Raises UsageError where
    `at_most` is below 1."""
    if at_most < 1:
        raise UsageError("--max-replicas", "at least 1", at_most)
    tried: dict[int, Answers] = {}

    def meets(replicas: int) -> bool:
        if replicas not in tried:
            tried[replicas] = answer(replicas)
        return tried[replicas].meets_times

    low, high = 0, min(max(1, begin), at_most)
    while not meets(high):
        if high == at_most:
            return None, [tried[size] for size in sorted(tried)]
        low, high = high, min(2 * high, at_most)
    while high - low > 1:
        middle = (low + high) // 2
        if meets(middle):
            high = middle
        else:
            low = middle
    return tried[high], [tried[size] for size in sorted(tried)]


__all__ = ["fewest_replicas"]

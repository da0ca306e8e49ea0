"""Hints that agents could give of their sessions, taken as true.

    of session    0     1     2    of what several share
    priority      0     1     0     0      the lowest is evicted first; of equal ones the oldest
    retention    .25   .25   .10   .25     of a turn that has ended

The simulator takes hints, the engine does not; docs/hints.md says what they could gain. Sessions
are those of `Traffic.session`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtier.traffic.prefixes import Float64, Int32, Traffic


@dataclass(frozen=True)
class Hints:
    """The hints of all sessions; None where nothing is said.

    priority, retention: [sessions + 1], the last for what several share; priority is at least 0
    away_s: [requests], said with a request: the time from its answer until the session asks again,
            infinite where it never does, nan where nothing is said. Until then its priority is
            below 0: of such sessions the one that comes back last is evicted first.
    """

    priority: Float64 | None = None
    retention: Float64 | None = None
    away_s: Float64 | None = None

    def filled(self, traffic: Traffic, retention: float) -> tuple[Float64, Float64, Float64]:
        """Return the three arrays for a traffic. retention: that of all sessions, where none is
        said."""
        sessions, requests = traffic.num_sessions + 1, traffic.num_requests
        found = (
            np.zeros(sessions) if self.priority is None else self.priority,
            np.full(sessions, retention) if self.retention is None else self.retention,
            np.full(requests, np.nan) if self.away_s is None else self.away_s,
        )
        assert [len(one) for one in found] == [sessions, sessions, requests]
        return found


def away_s(traffic: Traffic) -> Float64:
    """Return the true `Hints.away_s` of a traffic whose requests wait for answers (a closed
    loop)."""
    later = traffic.next_request
    return np.where(later < 0, np.inf, traffic.think_s[later])


def owners(traffic: Traffic) -> Int32:
    """Return, for each node, the session whose requests alone use it, or the number of sessions
    where several do."""
    count = traffic.num_sessions
    least = np.full(len(traffic.parent), count, np.int32)
    most = np.full(len(traffic.parent), -1, np.int32)
    for node in (traffic.node, traffic.out_node):
        np.minimum.at(least, node, traffic.session)
        np.maximum.at(most, node, traffic.session)
    for depth in range(int(traffic.depth.max()), 0, -1):
        nodes = np.flatnonzero(traffic.depth == depth)
        np.minimum.at(least, traffic.parent[nodes], least[nodes])
        np.maximum.at(most, traffic.parent[nodes], most[nodes])
    return np.where(least == most, least, count).astype(np.int32)

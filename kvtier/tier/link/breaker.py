"""A circuit breaker: after a few failures no call is made until a probe finds the tier well.

    closed ─── `failures` in a row ──> open ─── a probe succeeds ──> on probation
      ↑                                 ↑ ↺ a probe fails                 │
      │                                 └───────── a call fails ──────────┤
      └─────────────────────────────── a call succeeds ───────────────────┘

Every way back to open waits longer for the next probe, at most `longest_s`.
While it is open, calls are refused at once, so that a dead tier costs its users nothing; probes are
the job of a thread (kvtier.tier.link.link), so that no user's request has to try. A tier that
answers probes and fails at everything else costs one failure per probation.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

FAILURES = 3
FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 5.0


class Breaker:
    """Thread-safe. clock: seconds, monotonic. opened: how often, in all."""

    def __init__(
        self,
        failures: int = FAILURES,
        first_s: float = FIRST_WAIT_S,
        longest_s: float = LONGEST_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit, self._first_s, self._longest_s = failures, first_s, longest_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._wait_s = first_s
        self._probe_at: float | None = None
        self._opened_at: float | None = None
        self.opened = 0

    def alike(self, failures: int) -> Breaker:
        """Another one with these times."""
        return Breaker(failures, self._first_s, self._longest_s, self._clock)

    @property
    def is_open(self) -> bool:
        """Return whether calls are refused."""
        return self._probe_at is not None

    @property
    def open_s(self) -> float:
        """The seconds since it first opened without a call going well since then, so probations do
        not start it again; 0 while it is closed."""
        opened_at = self._opened_at
        return 0.0 if opened_at is None or not self.is_open else self._clock() - opened_at

    def succeeded(self) -> None:
        """A call went well."""
        with self._lock:
            self._opened_at = None
            self._failures, self._wait_s, self._probe_at = 0, self._first_s, None

    def probed(self) -> None:
        """A probe went well: calls may try, but the next failure opens again."""
        with self._lock:
            if self._probe_at is not None:
                self._failures, self._probe_at = self._limit - 1, None
                self._wait_longer()

    def failed(self) -> bool:
        """A call or probe failed; returns whether the breaker opened by it."""
        with self._lock:
            if self._probe_at is not None:
                self._wait_longer()
                self._set_probe()
                return False
            self._failures += 1
            if self._failures < self._limit:
                return False
            self.opened += 1
            self._opened_at = self._clock() if self._opened_at is None else self._opened_at
            self._set_probe()
            return True

    def _wait_longer(self) -> None:
        self._wait_s = min(2 * self._wait_s, self._longest_s)

    def _set_probe(self) -> None:
        # Jittered, or all servers of a tier would come back to it at once.
        self._probe_at = self._clock() + self._wait_s * random.uniform(0.75, 1.25)

    def seconds_to_probe(self) -> float | None:
        """Return the seconds until a probe is due, 0 when it is; None while closed."""
        probe_at = self._probe_at
        return None if probe_at is None else max(0.0, probe_at - self._clock())

"""Calls to the tier from the background: each is told to a breaker, and counted where it fails.

A call that fails is a miss. While the breaker is open no call is made but the probes of a thread,
so that no request has to try.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from kvtier.errors import (
    TierError,
    TierExhaustedError,
    TierIntegrityError,
    TierProtocolError,
    TierRefusedError,
    TierUnavailableError,
)
from kvtier.tier.client import TierClient
from kvtier.tier.link.breaker import Breaker

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# These errors say nothing about the tier's health: it answered, and the next call may go well.
_HARMLESS = (TierExhaustedError, TierIntegrityError)
_MISCONFIGURED = (TierRefusedError, TierProtocolError)


class GivenUpError(TierUnavailableError):
    """The tier was not asked: the breaker is open."""


class Calls:
    """The calls of one client. Thread-safe.

    put_breaker: opens where puts fail; a put is retried after a while, and gets do not wait for it.
    connected:   whether the client has asked who is there since the last failure.
    closed:      failures are no news any more: closing cuts off what is under way.
    """

    def __init__(self, client: TierClient, breaker: Breaker) -> None:
        self.client, self.breaker = client, breaker
        self.put_breaker = breaker.alike(failures=1)
        self.counters: Counter[str] = Counter()
        self.connected = False
        self.closed = False
        # Notified when the breaker opens and when the tier is back; its lock guards the counters.
        self._changed = threading.Condition()

    @property
    def healthy(self) -> bool:
        """Return whether asking makes sense now."""
        return not self.breaker.is_open and not self.closed

    def count(self, name: str, number: int = 1) -> None:
        """Add to one of the `counters`, which many threads change."""
        with self._changed:
            self.counters[name] += number

    def run_or_miss(self, what: str, work: Callable[[TierClient], Result]) -> Result | None:
        """Run one call; None where it fails."""
        try:
            return self.run(what, work)
        except TierError:
            return None

    def run(
        self, what: str, work: Callable[[TierClient], Result], *, repeated: bool = False
    ) -> Result | None:
        """Run one call; its failure is counted and told to the breaker. None where that is a bug of
        ours. Raises TierError.

        repeated: it failed before, which the breaker knows; only a tier that is not there is news.
        """
        if what != "probe" and self.breaker.is_open:
            self.count("refused_while_open")
            raise GivenUpError(f"tier {self.client.address}: given up on for now")
        is_there = False
        try:
            if not self.connected:
                self.client.connect()
                self.connected = True
            is_there = True
            result = work(self.client)
        except _HARMLESS as error:
            self.count(f"{what}_{type(error).__name__}")
            self.breaker.succeeded()
            raise
        except TierError as error:
            self._failed(what, error, news=not (repeated and is_there))
            raise
        except BaseException:
            # A bug of ours in the background must not end the threads that others wait for.
            logger.exception("a tier %s failed unexpectedly", what)
            self.count(f"{what}_bugs")
            if what == "probe":
                self.breaker.failed()
            return None
        if what == "probe":
            self.breaker.probed()
            self.put_breaker.succeeded()
            logger.info("tier %s is back", self.client.address)
            with self._changed:
                self._changed.notify_all()
        else:
            self.breaker.succeeded()
        return result

    def _failed(self, what: str, error: TierError, *, news: bool = True) -> None:
        if self.closed:
            # Closing cuts off the calls that are under way: their failures say nothing.
            return
        self.count(f"{what}_{type(error).__name__}")
        self.connected = False
        logger.debug("tier %s: %s", what, error)
        if news and self.breaker.failed():
            level = logging.ERROR if isinstance(error, _MISCONFIGURED) else logging.WARNING
            logger.log(level, "%s; serving goes on without the tier until it is back", error)
            with self._changed:
                self._changed.notify_all()

    def probe_until_closed(self) -> None:
        """Look after an open breaker; for a thread of its own."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.closed or self.breaker.is_open)
                if self.closed:
                    return
                due = self.breaker.seconds_to_probe() or 0.0
                self._changed.wait_for(lambda: self.closed, due)
            if self.closed:
                return
            self.connected = False
            self.run_or_miss("probe", lambda client: True)

"""The engine's side of its tier: calls in the background that never fail and never wait long.

    scheduler ── put(blobs) ──> [ queue, bounded in bytes ] ── one thread ──> tier
              ── submit(work) ─> [ queue, bounded ]         ── one thread ──> tier
              <── Fetch.done, Fetch.result: what came, or None

Blobs on their way share one budget of host memory. When it is short, puts that still wait are shed
first, newest first, then gets are refused: a later turn can do without a put, the current one waits
for its get. Of a context's spans the first ones are worth the most, because a run that begins with
a gap is of no use.

Puts outlast a tier that is restarted: what it could not take waits, inside that budget, until it is
back. After HOLD_S without it nothing more is taken, or a dead tier would cost copies for nothing.
Gets do not wait: what is not there is computed. But a turn may ask for what the one before it still
has on its way: those puts go first then, and only the gets that ask for them wait, SETTLE_S at
most.

Nothing here raises because of the tier: a call that fails is counted and is a miss. What runs in
the background runs in a copy of its caller's contextvars, so that it belongs to its caller's trace.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextvars import copy_context
from typing import Any

from kvtier.errors import TierError, TierIntegrityError, TierUnavailableError
from kvtier.tier.client import Blob, TierClient
from kvtier.tier.link.breaker import Breaker
from kvtier.tier.link.calls import Calls, GivenUpError
from kvtier.tier.link.queues import Fetch, Incoming, Outgoing, Put, Result

logger = logging.getLogger(__name__)

# Fetches that may wait; a scheduler that has more of them under way computes faster by itself.
WAITING_FETCHES = 256
# For threads to end when the link closes; calls under way are cut off.
CLOSE_S = 5.0
# A get waits for puts of its context for so long: what is not there by then is a miss.
SETTLE_S = 0.5
# Longer than restarting a tier takes.
HOLD_S = 15.0
# The attempts of one put, before it is given up.
PUT_ATTEMPTS = 5
# A put that failed so may go well another time.
_PASSING = (TierUnavailableError, TierIntegrityError)


class TierLink(Calls):
    """Two queues of work for one client, which the link owns. Thread-safe.

    buffer_bytes: host memory for blobs on their way, both directions together.
    settle_s:     longest wait of a fetch for what it needs to reach the tier; None: SETTLE_S.
    """

    def __init__(
        self,
        client: TierClient,
        *,
        buffer_bytes: int,
        breaker: Breaker | None = None,
        settle_s: float | None = None,
    ) -> None:
        super().__init__(client, breaker or Breaker())
        self._buffer_bytes = buffer_bytes
        self._settle_s = settle_s
        self._claimed_bytes = 0
        self._puts = Outgoing()
        self._fetches = Incoming()
        self._busy = 0
        targets = {
            "putting": self._putting,
            "getting": self._getting,
            "probing": self.probe_until_closed,
        }
        self._threads = [
            threading.Thread(target=target, name=f"kvtier-{name}", daemon=True)
            for name, target in targets.items()
        ]
        for thread in self._threads:
            thread.start()

    # -- from the scheduler --

    @property
    def pending(self) -> int:
        """Puts and fetches that wait or are under way."""
        with self._changed:
            return len(self._puts) + len(self._fetches) + self._busy

    @property
    def held_bytes(self) -> int:
        """The bytes of the budget that are used: puts on their way, and what was claimed."""
        return self._puts.held_bytes + self._claimed_bytes

    @property
    def room_bytes(self) -> int:
        """The bytes of the budget that a put may use now."""
        if self.closed or self.breaker.open_s > HOLD_S:
            return 0
        return max(0, self._buffer_bytes - self.held_bytes)

    def put(
        self,
        blobs: Sequence[Blob],
        *,
        replace: bool = False,
        ready: Callable[[TierClient], bool] | None = None,
        reads: AbstractSet[bytes] = frozenset(),
        group: object = None,
    ) -> int:
        """Queue blobs; returns how many were taken. The others are shed, the last ones first. A
        blob that is on its way already is taken without a second one, but for `replace`.

        ready: called in the background before a payload is read, perhaps more than once; blocks
        until it is complete, and says whether that came true: else it is not stored. reads: names
        of blobs that it asks the client for; puts of those go first. group: hashable, of what may
        not overtake each other, by default these.
        """
        group = object() if group is None else group
        context = copy_context()
        jobs = [Put(blob, replace, blob.num_bytes, ready, reads, group, context) for blob in blobs]
        taken = 0
        with self._changed:
            for job in jobs:
                if replace or not self._puts.has_any({job.blob.key}):
                    if job.num_bytes > self.room_bytes:
                        break
                    self._puts.append(job)
                taken += 1
            self.count("puts_shed", len(jobs) - taken)
            self._changed.notify_all()
        return taken

    def submit(
        self,
        work: Callable[[TierClient], Result],
        *,
        needs: Callable[[], Iterable[bytes]] | None = None,
    ) -> Fetch[Result]:
        """Run `work` with the client in the background.

        needs: names of blobs, asked for in the background. While some of them are on their way to
        the tier and puts are well, the groups of their puts go before all others, and the work
        waits for them, `settle_s` at the most.
        """
        fetch = Fetch(work, needs)
        with self._changed:
            full = len(self._fetches) >= WAITING_FETCHES
            if full or not self.healthy:
                self.count("gets_refused" if full else "refused_while_open")
                fetch.end(None)
                return fetch
            self._fetches.append(fetch)
            self._changed.notify_all()
        return fetch

    def claim(self, num_bytes: int) -> bool:
        """Host memory for a get, to be given back with `release`; False where there is none."""
        with self._changed:
            if self.held_bytes - self._puts.waiting_bytes + num_bytes > self._buffer_bytes:
                self.count("gets_refused")
                return False
            while self.held_bytes + num_bytes > self._buffer_bytes:
                self._puts.shed()
                self.count("puts_shed")
            self._claimed_bytes += num_bytes
            self._changed.notify_all()
        return True

    def release(self, num_bytes: int) -> None:
        """Give back what `claim` got."""
        with self._changed:
            self._claimed_bytes -= num_bytes

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is on its way; returns whether that was reached. While the tier is
        away puts are on their way. For tests and the end of a bench."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._puts or self._fetches or self._busy), timeout_s
            )

    def close(self) -> None:
        """Stop; what waits or is under way is lost. Waits CLOSE_S at the longest."""
        with self._changed:
            self.closed = True
            fetches = self._fetches.clear()
            while self._puts:
                self._puts.shed()
            self._changed.notify_all()
        for fetch in fetches:
            fetch.end(None)
        self.client.close()
        until = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                logger.warning("%s does not end; it is left behind", thread.name)

    # -- the threads --

    def _putting(self) -> None:
        while (job := self._next_put()) is not None:
            try:
                counted = job.context.run(self._store, job)
            except GivenUpError:
                self._put_back(job)
            except _PASSING:
                self.put_breaker.failed()
                self._put_back(job._replace(failures=job.failures + 1))
            except TierError:
                self._put_ended(job, Counter())
            else:
                self.put_breaker.succeeded()
                self._put_ended(job, counted)

    def _store(self, job: Put) -> Counter[str]:
        """Raises TierError."""

        def put(client: TierClient) -> Counter[str]:
            if job.ready is not None and not job.ready(client):
                return Counter(puts_incomplete=1)
            stored = client.put(job.blob, replace=job.replace)
            return Counter(put=1, put_bytes=job.num_bytes) if stored else Counter(put_known=1)

        return self.run("put", put, repeated=job.failures > 0) or Counter()

    def _put_back(self, job: Put) -> None:
        """Put the job back at the head of the queue, unless that was its last attempt."""
        with self._changed:
            if self.closed or job.failures >= PUT_ATTEMPTS:
                # The next one may do better, at once.
                self.put_breaker.succeeded()
                self._put_ended(job, Counter(puts_given_up=1))
                return
            self._puts.put_back(job)
            self._ended_one()

    def _put_ended(self, job: Put, counted: Counter[str]) -> None:
        with self._changed:
            self.counters.update(counted)
            self._puts.over(job)
            self._ended_one()

    def _ended_one(self) -> None:
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()

    def _getting(self) -> None:
        while (fetch := self._next_fetch()) is not None:
            if self._held(fetch):
                continue
            run, began = self.run_or_miss, time.monotonic()
            result = None if fetch.cancelled else fetch.context.run(run, "get", fetch.work)
            fetch.took_s = time.monotonic() - began
            try:
                fetch.end(result)
            except Exception:
                logger.exception("a result that was no longer wanted could not be given back")
                self.count("get_bugs")
            self._ended_one()

    def _held(self, fetch: Fetch[Any]) -> bool:
        """Hold a fetch that needs what is on its way; whether that is so."""
        if fetch.needs is None or fetch.cancelled:
            return False
        needs, fetch.needs = fetch.needs, None
        try:
            wanted = frozenset(needs())
        except BaseException:
            # A bug of ours; the work meets it again, and is guarded.
            return False
        with self._changed:
            if self._settled(wanted):
                return False
            self.count("gets_settled")
            self._puts.prioritize(wanted)
            longest_s = SETTLE_S if self._settle_s is None else self._settle_s
            self._fetches.hold(fetch, wanted, longest_s)
            self._ended_one()
        return True

    def _settled(self, keys: AbstractSet[bytes]) -> bool:
        """Return whether none of these is on its way, or puts are not well and no get should
        wait."""
        well = self.healthy and not self.put_breaker.is_open
        return not (well and self._puts.has_any(keys))

    def _next_put(self) -> Put | None:
        with self._changed:
            while not self.closed:
                pause = self.put_breaker.seconds_to_probe() or 0.0
                if self._puts and not self.breaker.is_open and not pause:
                    self._busy += 1
                    return self._puts.next()
                self._changed.wait(pause or None)
        return None

    def _next_fetch(self) -> Fetch[Any] | None:
        with self._changed:
            while not self.closed:
                fetch = self._fetches.next(self._settled)
                if fetch is not None:
                    self._busy += 1
                    return fetch
                self._changed.wait(self._fetches.pause_s)
        return None

"""The calibration curve that a serving engine goes by, kept fresh beside the requests.

    store ──poll──> watcher thread ──> curve()                  (instant, never raises)
      │ down                 │
      └── last known, then local copy, then None (full retention)

Whatever goes wrong is counted by reason, logged once until it changes, and changes nothing else.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kvtier.calibration.documents import CurveDocument, Document
from kvtier.calibration.keys import Key
from kvtier.calibration.store.base import CalibrationStore
from kvtier.calibration.store.directory import LocalCopy, open_store
from kvtier.config import Settings
from kvtier.errors import (
    CalibrationDocumentError,
    CalibrationMismatchError,
    StoreError,
    StoreRefusedError,
)

logger = logging.getLogger(__name__)

JITTER = 0.1
MAX_BACKOFF_S = 60.0
CLOSE_TIMEOUT_S = 10.0
LOCAL_DIRECTORY = "copies"
REASONS = (
    "polls", "changes", "unavailable", "refused", "invalid", "mismatch", "local_copy", "unexpected",
)  # fmt: skip

OnEvent = Callable[[str], None]


@dataclass(frozen=True)
class Served:
    """The identity of what runs here; only a curve that was measured on exactly this is used.

    policy: as in the curve's key.
    """

    model: str
    revision: str | None
    policy: str
    dtype: str

    @property
    def key(self) -> Key:
        return Key.of("curve", self.model, self.revision, self.policy)

    def checked(self, document: Document | None) -> CurveDocument | None:
        """A document of a curve's key. Raises CalibrationMismatchError for one of something
        else."""
        assert document is None or isinstance(document, CurveDocument), "no curve under its key"
        if document is not None:
            document.check_fits(self.model, self.revision, self.policy, self.dtype)
        return document


class CalibrationWatcher:
    """Polls a store from a daemon thread that starts with the object and ends with `close`.

    Owns the store and closes it. `curve` and `counters` may be called from any thread.
    poll_s: between polls, give or take a tenth; while the store is down the pause doubles up to
    MAX_BACKOFF_S. A curve that the store no longer has is no longer used: it was deleted, or it
    expired.
    on_event: called with one of REASONS whenever it happens, from the watcher's thread.
    """

    def __init__(
        self,
        store: CalibrationStore,
        served: Served,
        *,
        local: LocalCopy,
        poll_s: float,
        on_event: OnEvent | None = None,
    ) -> None:
        self._store, self._served, self._local, self._poll_s = store, served, local, poll_s
        # Immutable, and assigned in one step: readers need no lock.
        self._curve: CurveDocument | None = None
        self._counts: Counter[str] = Counter()
        self._on_event = on_event
        self._last_problem: dict[str, str] = {}
        self._first_poll, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvtier-calibration", daemon=True)
        self._thread.start()

    def curve(self) -> CurveDocument | None:
        """Return the curve to serve by now; None: not calibrated, or never seen."""
        return self._curve

    @property
    def counters(self) -> dict[str, int]:
        """Events so far, one number for each of REASONS."""
        return {reason: self._counts[reason] for reason in REASONS}

    def wait_first_poll(self, timeout_s: float) -> bool:
        """Wait at start-up until the store was asked once; whether that happened in time."""
        return self._first_poll.wait(timeout_s)

    def close(self) -> None:
        """Stop polling and close the store; waits at most for the call that is under way."""
        self._stopping.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        self._store.close()

    def _watch(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            failures = 0 if self._poll() else failures + 1
            self._first_poll.set()
            pause = min(self._poll_s * 2 ** min(failures, 10), max(self._poll_s, MAX_BACKOFF_S))
            self._stopping.wait(pause * random.uniform(1 - JITTER, 1 + JITTER))

    def _poll(self) -> bool:
        """Ask for the curve; whether the store answered."""
        self._count("polls")
        try:
            self._take(self._served.checked(self._store.get(self._served.key, renew=True)))
        except StoreError as error:
            refused = isinstance(error, StoreRefusedError)
            self._failed("store", "refused" if refused else "unavailable", error)
            return False
        except CalibrationDocumentError as error:
            mismatch = isinstance(error, CalibrationMismatchError)
            self._failed("curve", "mismatch" if mismatch else "invalid", error)
        except Exception as error:
            # A thread that dies of a bug would freeze the calibration without a word.
            self._failed("curve", "unexpected", error)
        self._works("store")
        return True

    def _take(self, curve: CurveDocument | None) -> None:
        """Go by what the store has."""
        self._works("curve")
        key = self._served.key
        if curve is None:
            # Without this a deleted curve would come back the next time the store is down.
            self._local.forget(key)
        if curve == self._curve:
            return
        self._curve = curve
        self._count("changes")
        if curve is None:
            logger.warning("calibration %s is gone from the store; not used any more", key)
        else:
            self._local.save(curve)
            logger.info("calibration %s is in use, made at %s", key, curve.created_at)

    def _fall_back(self) -> None:
        """Read the local copy, where no curve is known yet."""
        if self._curve is not None:
            return
        with suppress(CalibrationMismatchError):
            self._curve = self._served.checked(self._local.load(self._served.key))
        if self._curve is not None:
            self._count("local_copy")
            logger.warning("calibration %s comes from its local copy", self._served.key)

    def _failed(self, what: str, reason: str, error: Exception) -> None:
        self._count(reason)
        if self._last_problem.get(what) != reason:
            self._last_problem[what] = reason
            trace = error if reason == "unexpected" else None
            logger.warning("%s: %s: %s", what, reason, error, exc_info=trace)
        self._fall_back()

    def _count(self, reason: str) -> None:
        self._counts[reason] += 1
        if self._on_event is None:
            return
        try:
            self._on_event(reason)
        except Exception:
            # A listener must not end the thread; one that fails once is dropped.
            self._on_event = None
            logger.warning("the listener to calibration events failed", exc_info=True)

    def _works(self, what: str) -> None:
        if self._last_problem.pop(what, None) is not None:
            logger.info("%s: works again", what)


def watch(
    settings: Settings, served: Served, on_event: OnEvent | None = None
) -> CalibrationWatcher:
    """A watcher on the store of `settings`, with its local copy in the data directory."""
    return CalibrationWatcher(
        open_store(settings),
        served,
        local=LocalCopy(settings.data_dir / LOCAL_DIRECTORY),
        poll_s=settings.calibration.poll_s,
        on_event=on_event,
    )

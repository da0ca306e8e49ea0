"""What a serving engine knows of its calibration, kept fresh beside the requests.

    store ──poll──> watcher thread ──> current(): Snapshot        (instant, never raises)
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
from dataclasses import dataclass
from typing import Any

from kvtier.calibration.documents import CurveDocument, Document, ProfileDocument
from kvtier.calibration.documents.keys import CurveKey, Key, ProfileKey, curve_key, profile_key
from kvtier.calibration.store.base import CalibrationStore
from kvtier.calibration.store.local_copy import LocalCopy
from kvtier.calibration.store.opening import open_store
from kvtier.config import Settings
from kvtier.errors import (
    CalibrationDocumentError,
    CalibrationMismatchError,
    StoreError,
    StoreRefusedError,
)
from kvtier.heads.profile import ModelShape

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
    """What runs here; only documents measured on exactly this are used.

    policy: as in the curve's key. shape: None leaves the head layout to the profile's user.
    """

    model: str
    revision: str | None
    policy: str
    dtype: str
    shape: ModelShape | None = None

    @property
    def curve_key(self) -> CurveKey:
        return curve_key(self.model, self.revision, self.policy)

    @property
    def profile_key(self) -> ProfileKey:
        return profile_key(self.model, self.revision)

    def check(self, document: Document) -> None:
        """Raise CalibrationMismatchError for a document of something else."""
        if isinstance(document, CurveDocument):
            document.check_fits(self.model, self.revision, self.policy, self.dtype)
        elif isinstance(document, ProfileDocument):
            document.check_fits(self.model, self.revision, self.shape)
        else:
            raise CalibrationMismatchError(f"{document.key}: no curve and no head profile")


@dataclass(frozen=True)
class Snapshot:
    """What is known at one moment; None: not calibrated, or never seen."""

    profile: ProfileDocument | None = None
    curve: CurveDocument | None = None


class CalibrationWatcher:
    """Polls a store from a daemon thread that starts with the object and ends with `close`.

    Owns the store and closes it. `current` and `counters` may be called from any thread.
    poll_s: between polls, give or take a tenth; while the store is down the pause doubles up to
    MAX_BACKOFF_S. A document that the store no longer has is no longer used: it was deleted, or
    it expired.
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
        self._snapshot = Snapshot()
        self._counts: Counter[str] = Counter()
        self._on_event = on_event
        self._last_problem: dict[str, str] = {}
        self._first_poll, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvtier-calibration", daemon=True)
        self._thread.start()

    def current(self) -> Snapshot:
        """What to serve by, now."""
        return self._snapshot

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
        """Ask for both documents; whether the store answered."""
        self._count("polls")
        keys: tuple[Key, ...] = (self._served.profile_key, self._served.curve_key)
        for key in keys:
            try:
                self._look_up(key)
            except StoreError as error:
                refused = isinstance(error, StoreRefusedError)
                self._failed("store", "refused" if refused else "unavailable", error)
                self._fall_back(keys)
                return False
            except Exception as error:
                # A thread that dies of a bug would freeze the calibration without a word.
                self._failed(key.kind, "unexpected", error)
                self._fall_back((key,))
        self._works("store")
        return True

    def _look_up(self, key: Key) -> None:
        try:
            document = self._store.get(key)
            if document is not None:
                self._served.check(document)
        except CalibrationDocumentError as error:
            mismatch = isinstance(error, CalibrationMismatchError)
            self._failed(key.kind, "mismatch" if mismatch else "invalid", error)
            self._fall_back((key,))
            return
        self._works(key.kind)
        if document is None:
            # Or a deleted document would come back the next time the store is down.
            self._local.forget(key)
        if document == getattr(self._snapshot, key.kind):
            return
        self._use(key, document)
        self._count("changes")
        if document is None:
            logger.warning("calibration %s is gone from the store; not used any more", key)
        else:
            self._local.save(document)
            logger.info("calibration %s is in use, made at %s", key, document.created_at)

    def _use(self, key: Key, document: Document | None) -> None:
        known: dict[str, Any] = {
            "profile": self._snapshot.profile,
            "curve": self._snapshot.curve,
            key.kind: document,
        }
        # One assignment of an immutable object: readers need no lock.
        self._snapshot = Snapshot(**known)

    def _fall_back(self, keys: tuple[Key, ...]) -> None:
        """Read the local copy of whatever is not known yet."""
        for key in keys:
            if getattr(self._snapshot, key.kind) is not None:
                continue
            document = self._local.load(key)
            if document is not None and self._fits(document):
                self._use(key, document)
                self._count("local_copy")
                logger.warning("calibration %s comes from its local copy", key)

    def _fits(self, document: Document) -> bool:
        try:
            self._served.check(document)
        except CalibrationMismatchError:
            return False
        return True

    def _failed(self, what: str, reason: str, error: Exception) -> None:
        self._count(reason)
        if self._last_problem.get(what) != reason:
            self._last_problem[what] = reason
            trace = error if reason == "unexpected" else None
            logger.warning("%s: %s: %s", what, reason, error, exc_info=trace)

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

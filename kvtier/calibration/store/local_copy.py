"""The last known documents on disk, for the time when the store cannot be reached."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from kvtier.calibration.documents import Document
from kvtier.calibration.documents.keys import Key
from kvtier.calibration.store.directory import DirectoryStore
from kvtier.errors import CalibrationDocumentError, StoreError

logger = logging.getLogger(__name__)


class LocalCopy:
    """Copies in a `DirectoryStore`. Never raises: what cannot be read is a miss, what cannot be
    written is left out, and each is logged once per key until it works again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._store = DirectoryStore(directory)
        self._reported: set[Key] = set()

    def load(self, key: Key) -> Document | None:
        """The last document saved under `key`, if it is there and whole."""
        try:
            document = self._store.get(key)
        except (StoreError, CalibrationDocumentError) as error:
            self._report(key, "local copy %s is not used: %s", self.path(key), error)
            return None
        self._reported.discard(key)
        return document

    def save(self, document: Document) -> bool:
        """Replace the copy, atomically; whether it worked."""
        key = document.key
        try:
            self._store.put(document)
        except (StoreError, CalibrationDocumentError) as error:
            self._report(key, "local copy %s cannot be written: %s", self.path(key), error)
            return False
        self._reported.discard(key)
        return True

    def forget(self, key: Key) -> None:
        """Remove the copy of a document that the store no longer has."""
        with suppress(StoreError):
            self._store.delete(key)

    def path(self, key: Key) -> Path:
        """The file of a key."""
        return self._store.path(key)

    def _report(self, key: Key, message: str, *details: object) -> None:
        if key not in self._reported:
            self._reported.add(key)
            logger.warning(message, *details)


__all__ = ["LocalCopy"]

"""The last known documents on disk, for the time when the store cannot be reached."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from kvtier.calibration.documents import Document, parse_document
from kvtier.calibration.documents.keys import Key
from kvtier.calibration.documents.limits import read_limited
from kvtier.errors import CalibrationDocumentError

logger = logging.getLogger(__name__)


class LocalCopy:
    """One JSON file per key under `directory`. Never raises: what cannot be read is a miss, what
    cannot be written is left out, and each is logged once per key until it works again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reported: set[Key] = set()

    def load(self, key: Key) -> Document | None:
        """The last document saved under `key`, if it is there and whole."""
        path = self.path(key)
        try:
            document = parse_document(key, read_limited(path))
        except FileNotFoundError:
            return None
        except (OSError, CalibrationDocumentError) as error:
            self._report(key, "local copy %s is not used: %s", path, error)
            return None
        self._reported.discard(key)
        return document

    def save(self, document: Document) -> bool:
        """Replace the copy, atomically; whether it worked."""
        path = self.path(document.key)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _replace(path, document.to_json().encode())
        except OSError as error:
            self._report(document.key, "local copy %s cannot be written: %s", path, error)
            return False
        self._reported.discard(document.key)
        return True

    def forget(self, key: Key) -> None:
        """Remove the copy of a document that the store no longer has."""
        with suppress(OSError):
            self.path(key).unlink(missing_ok=True)

    def path(self, key: Key) -> Path:
        """File of a key; a digest, because a key can be longer than a file name."""
        digest = hashlib.sha256(str(key).encode()).hexdigest()[:32]
        return self.directory / f"{key.kind}-{digest}.json"

    def _report(self, key: Key, message: str, *details: object) -> None:
        if key not in self._reported:
            self._reported.add(key)
            logger.warning(message, *details)


def _replace(path: Path, content: bytes) -> None:
    handle, staging = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(staging, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(staging)
        raise

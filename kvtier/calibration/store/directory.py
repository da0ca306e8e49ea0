"""Calibration documents in files, where no Redis was named.

    DIRECTORY/MODEL/REVISION/profile.json
                             curve:POLICY.json
                             memory:NAME.json

Parts of a key are percent-encoded, as in its text. Files do not expire.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtier.calibration.documents import Document, max_bytes, parse_document, read_limited
from kvtier.calibration.keys import PREFIX, Key, parse_key, profile_key
from kvtier.calibration.store.base import CalibrationStore, StoredKey, text_of
from kvtier.errors import CalibrationDocumentError, StoreError, StoreUnavailableError, UsageError

SUFFIX = ".json"


class DirectoryStore(CalibrationStore):
    """See the module docstring. The directory is made by the first document.

    A document is replaced in one step: whoever reads meanwhile has the one before.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __repr__(self) -> str:
        return f"DirectoryStore({str(self.directory)!r})"

    def get(self, key: Key) -> Document | None:
        with self._usable():
            try:
                text = read_limited(self.path(key), max_bytes(key))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return parse_document(key, text)

    def put(self, document: Document) -> Key:
        key, text = document.key, text_of(document)
        with self._usable():
            path = self.path(key)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace(path, text.encode())
        return key

    def delete(self, key: Key) -> bool:
        with self._usable():
            try:
                self.path(key).unlink()
            except (FileNotFoundError, NotADirectoryError):
                return False
        return True

    def list(self) -> tuple[StoredKey, ...]:
        with self._usable():
            files = sorted(self.directory.glob(f"*/*/*{SUFFIX}"))
        keys = [key for file in files if (key := _key_of(file)) is not None]
        return tuple(StoredKey(key, None) for key in sorted(keys, key=str))

    def close(self) -> None:
        """Do nothing: no file is held open."""

    def path(self, key: Key) -> Path:
        """The file of a key."""
        kind, model, revision, *rest = str(key).removeprefix(PREFIX).split(":")
        # No directory may be called . or .. after a model.
        folders = [
            part if part.strip(".") else part.replace(".", "%2E") for part in (model, revision)
        ]
        return self.directory.joinpath(*folders, ":".join((kind, *rest)) + SUFFIX)

    def folder(self, model: str, revision: str | None) -> Path:
        """Return the folder of everything of a model, by its name and its weights' revision."""
        return self.path(profile_key(model, revision)).parent

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Raise StoreUnavailableError where the system does not let us work there."""
        try:
            yield
        except OSError as error:
            message = f"calibrations in {self.directory}: {error}"
            raise StoreUnavailableError(message) from error


def _key_of(file: Path) -> Key | None:
    """The key of a file; None for one that is not ours."""
    kind, *rest = file.name.removesuffix(SUFFIX).split(":")
    revision, model = (folder.name for folder in file.parents[:2])
    folders = [part.replace("%2E", ".") for part in (model, revision)]
    try:
        return parse_key(PREFIX + ":".join((kind, *folders, *rest)))
    except UsageError:
        return None


def replace(path: Path, content: bytes) -> None:
    """Write a file in one step: whoever reads meanwhile has the one before. Raises OSError."""
    handle, staging = tempfile.mkstemp(dir=path.parent, prefix=path.name[:32], suffix=".tmp")
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

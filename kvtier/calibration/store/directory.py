"""Calibration documents in files, where no Redis was named, and the choice between the two.

    DIRECTORY/MODEL/REVISION/profile.json
                             curve:POLICY.json
                             memory:NAME.json

Parts of a key are percent-encoded, as in its text. Files do not expire.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvtier.calibration.documents import Document, max_bytes, parse_document, read_limited
from kvtier.calibration.keys import PREFIX, Key, parse_key
from kvtier.calibration.store.base import CalibrationStore, StoredKey, text_of
from kvtier.config import Settings
from kvtier.errors import CalibrationDocumentError, StoreError, StoreUnavailableError, UsageError

DIRECTORY, SUFFIX = "calibration", ".json"
logger = logging.getLogger(__name__)

Done = TypeVar("Done")


def open_store(settings: Settings) -> CalibrationStore:
    """The Redis of `redis.url`; without one the files in `data_dir`."""
    if settings.redis.url is None:
        return DirectoryStore(settings.data_dir / DIRECTORY)
    from kvtier.calibration.store.redis import RedisStore

    return RedisStore(
        settings.redis.url.get_secret_value(),
        ca_certs=settings.redis.ca,
        certificate=settings.redis.certificate,
        key=settings.redis.key,
        timeout_s=settings.redis.timeout_s,
        ttl_s=settings.calibration.ttl_s,
    )


class DirectoryStore(CalibrationStore):
    """See the module docstring. The directory is made by the first document.

    A document is replaced in one step: whoever reads meanwhile has the one before.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __repr__(self) -> str:
        return f"DirectoryStore({str(self.directory)!r})"

    def get(self, key: Key, *, renew: bool = False) -> Document | None:
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
        return self.path(Key.of("profile", model, revision)).parent

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


class LocalCopy:
    """Copies in a `DirectoryStore`. Never raises: what cannot be read is a miss, what cannot be
    written is left out, and each is logged once per key until it works again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._store = DirectoryStore(directory)
        self._reported: set[Key] = set()

    def load(self, key: Key) -> Document | None:
        """The last document saved under `key`, if it is there and whole."""
        return self._tried(key, "is not used", lambda: self._store.get(key))

    def save(self, document: Document) -> bool:
        """Replace the copy, atomically; whether it worked."""
        put = partial(self._store.put, document)
        return self._tried(document.key, "cannot be written", put) is not None

    def forget(self, key: Key) -> None:
        """Remove the copy of a document that the store no longer has."""
        with suppress(StoreError):
            self._store.delete(key)

    def path(self, key: Key) -> Path:
        """The file of a key."""
        return self._store.path(key)

    def _tried(self, key: Key, fault: str, do: Callable[[], Done | None]) -> Done | None:
        try:
            done = do()
        except (StoreError, CalibrationDocumentError) as error:
            if key not in self._reported:
                self._reported.add(key)
                logger.warning("local copy %s %s: %s", self.path(key), fault, error)
            return None
        self._reported.discard(key)
        return done

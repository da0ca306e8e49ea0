"""Documents of a store in one JSON file, to carry them to another store or keep them.

{"schema_version": 1, "exported_at": "...", "documents": {KEY: DOCUMENT, ...}}
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from kvtier.calibration.documents import (
    MAX_EXPORT_BYTES,
    Document,
    check_size,
    parse_document,
    read_limited,
)
from kvtier.calibration.keys import Key, parse_key
from kvtier.calibration.store.base import CalibrationStore
from kvtier.errors import CalibrationDocumentError, UsageError
from kvtier.reading import parse_json

SCHEMA_VERSION = 1


def must_get(store: CalibrationStore, key: Key) -> Document:
    """The document under `key`. Raises UsageError where there is none."""
    document = store.get(key)
    if document is None:
        raise UsageError("KEY", "a stored key (see `kvtier calibration list`)", str(key))
    return document


def export_documents(store: CalibrationStore, path: Path, key: Key | None) -> list[Key]:
    """Write all documents, or the one under `key`, to `path`; returns what was written. Raises
    UsageError for a file that cannot be written, and for more than one file can hold."""
    if not path.parent.is_dir():
        raise UsageError("FILE", "a file in an existing directory", str(path))
    keys = [stored.key for stored in store.list()] if key is None else [key]
    documents = {str(one): must_get(store, one).model_dump(mode="json") for one in keys}
    content = {
        "schema_version": SCHEMA_VERSION,
        "exported_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "documents": documents,
    }
    text = json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"
    if len(text) > MAX_EXPORT_BYTES:
        expected = f"one key of several, as a file holds at most {MAX_EXPORT_BYTES} bytes"
        raise UsageError("KEY", expected, f"{len(documents)} documents of {len(text)} bytes")
    staging = Path(f"{path}.tmp")
    try:
        staging.write_bytes(text)
        staging.replace(path)
    except OSError as error:
        staging.unlink(missing_ok=True)
        raise UsageError("FILE", "a writable file", f"{path}: {error.strerror}") from error
    return keys


def read_export(path: Path) -> list[Document]:
    """The documents of an export, all of them valid.

    Raises UsageError for a file that is no export, CalibrationDocumentError for a bad document.
    """
    try:
        raw = read_limited(path, MAX_EXPORT_BYTES)
        check_size(raw, MAX_EXPORT_BYTES)
        content = parse_json(raw, str(path))
        version, documents = content.get("schema_version"), content.get("documents")
        if not isinstance(documents, dict):
            raise UsageError("FILE", "a file of `kvtier calibration export`", str(path))
        if version != SCHEMA_VERSION:
            raise UsageError("FILE", f"schema_version {SCHEMA_VERSION}", version)
        return [
            parse_document(parse_key(name, "FILE"), json.dumps(document))
            for name, document in documents.items()
        ]
    except CalibrationDocumentError as error:
        raise type(error)(f"{path}: {error}") from error
    except OSError as error:
        raise UsageError("FILE", "a readable file", f"{path}: {error.strerror}") from error


def import_documents(store: CalibrationStore, documents: list[Document]) -> list[tuple[Key, str]]:
    """Write validated documents; returns for each what that did: new, replaced or unchanged.

    An unchanged document is written too, which starts its time to live anew.
    """
    outcome = []
    for document in documents:
        change = _change(store, document)
        outcome.append((store.put(document), change))
    return outcome


def _change(store: CalibrationStore, document: Document) -> str:
    try:
        before = store.get(document.key)
    except CalibrationDocumentError:
        return "replaced"
    if before is None:
        return "new"
    return "unchanged" if before == document else "replaced"

"""Reading a document of any kind from outside."""

from __future__ import annotations

from kvtier.calibration.documents.base import parsed
from kvtier.calibration.documents.curve import CurveDocument
from kvtier.calibration.documents.keys import CurveKey, Key, MemoryKey, ProfileKey, WorthKey
from kvtier.calibration.documents.memory import MemoryDocument
from kvtier.calibration.documents.profile import ProfileDocument
from kvtier.calibration.documents.worth import WorthDocument
from kvtier.errors import CalibrationDocumentError, CalibrationMismatchError

Document = CurveDocument | ProfileDocument | WorthDocument | MemoryDocument

DOCUMENTS: dict[type[Key], type[Document]] = {
    CurveKey: CurveDocument,
    ProfileKey: ProfileDocument,
    WorthKey: WorthDocument,
    MemoryKey: MemoryDocument,
}


def max_bytes(key: Key) -> int:
    """Return the most bytes that the text of a document under `key` may have."""
    return DOCUMENTS[type(key)].max_bytes


def parse_document(key: Key, text: str | bytes) -> Document:
    """The document stored under `key`.

    Raises CalibrationDocumentError naming the key and the field at fault, and
    CalibrationMismatchError when the document belongs under another key.
    """
    try:
        document = parsed(DOCUMENTS[type(key)], text)
    except CalibrationDocumentError as error:
        raise CalibrationDocumentError(f"{key}: {error}") from error
    if document.key != key:
        raise CalibrationMismatchError(f"{key}: holds the document of {document.key}")
    return document

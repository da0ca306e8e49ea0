"""Reading a document of either kind from outside."""

from __future__ import annotations

from kvtier.calibration.documents.base import parsed
from kvtier.calibration.documents.curve import CurveDocument
from kvtier.calibration.documents.keys import CurveKey, Key
from kvtier.calibration.documents.profile import ProfileDocument
from kvtier.errors import CalibrationDocumentError, CalibrationMismatchError

Document = CurveDocument | ProfileDocument


def parse_document(key: Key, text: str | bytes) -> Document:
    """The document stored under `key`.

    Raises CalibrationDocumentError naming the key and the field at fault, and
    CalibrationMismatchError when the document belongs under another key.
    """
    kind: type[CurveDocument | ProfileDocument] = (
        CurveDocument if isinstance(key, CurveKey) else ProfileDocument
    )
    try:
        document = parsed(kind, text)
    except CalibrationDocumentError as error:
        raise CalibrationDocumentError(f"{key}: {error}") from error
    if document.key != key:
        raise CalibrationMismatchError(f"{key}: holds the document of {document.key}")
    return document

"""The limits on the size and depth of a calibration, for it to be parsed at all.

Real documents have some ten kilobytes and are five levels deep; what tokens are worth has megabytes
(22 for a model of 80 layers with 8 KV heads of 128). JSON that is deeper than a parser
can follow ends it with an error that is not its own, so it is refused before it is parsed.
"""

from __future__ import annotations

from pathlib import Path

from kvtier.errors import CalibrationDocumentError
from kvtier.reading import MAX_NESTING, is_too_deep

MAX_DOCUMENT_BYTES = 1 << 20
MAX_WORTH_BYTES = 32 << 20
MAX_EXPORT_BYTES = 64 << 20


def check_json_limits(text: str | bytes, max_bytes: int = MAX_DOCUMENT_BYTES) -> None:
    """Raise CalibrationDocumentError for text of more than max_bytes or MAX_NESTING levels."""
    raw = text.encode(errors="replace") if isinstance(text, str) else text
    if len(raw) > max_bytes:
        raise CalibrationDocumentError(f"document: larger than {max_bytes} bytes")
    if is_too_deep(raw):
        raise CalibrationDocumentError(f"document: nested deeper than {MAX_NESTING} levels")


def read_limited(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """A file, or so much of one that is too large that `check_json_limits` refuses it.

    Raises OSError.
    """
    with path.open("rb") as stream:
        return stream.read(max_bytes + 1)

"""The documents of the calibration store: one JSON document per curve, head profile, published
memory, and model whose tokens' worth is known.

A caller that reads one from outside uses `parse_document`, and `check_fits` before using a curve or
a profile.
"""

from __future__ import annotations

from kvtier.calibration.documents.curve import CurveDocument, document_of_fit, load_curve
from kvtier.calibration.documents.memory import MemoryDocument
from kvtier.calibration.documents.parsing import Document, max_bytes, parse_document
from kvtier.calibration.documents.profile import ProfileDocument
from kvtier.calibration.documents.worth import WorthDocument

__all__ = [
    "CurveDocument",
    "Document",
    "MemoryDocument",
    "ProfileDocument",
    "WorthDocument",
    "document_of_fit",
    "load_curve",
    "max_bytes",
    "parse_document",
]

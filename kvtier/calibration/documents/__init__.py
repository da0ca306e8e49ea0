"""What the calibration store holds: one JSON document per curve, head profile and published memory.

A caller that reads one from outside uses `parse_document`, and `check_fits` before using a curve or
a profile.
"""

from __future__ import annotations

from kvtier.calibration.documents.curve import CurveDocument, document_of_fit, load_curve
from kvtier.calibration.documents.memory import MemoryDocument
from kvtier.calibration.documents.parsing import Document, parse_document
from kvtier.calibration.documents.profile import ProfileDocument

__all__ = [
    "CurveDocument",
    "Document",
    "MemoryDocument",
    "ProfileDocument",
    "document_of_fit",
    "load_curve",
    "parse_document",
]

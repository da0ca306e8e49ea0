"""The interface of a store of calibration documents.

Every key expires, so that models no longer served leave by themselves; a document's time starts
anew when it is written again, and when a server reads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvtier.calibration.documents import Document, check_size
from kvtier.calibration.keys import Key
from kvtier.errors import CalibrationDocumentError


@dataclass(frozen=True)
class StoredKey:
    """A key and the seconds it still has; None when it never expires (kvtier sets no such key)."""

    key: Key
    ttl_s: float | None


def text_of(document: Document) -> str:
    """Return the text that a store keeps of a document. Raises CalibrationDocumentError, naming its
    key, for one that is too large to be read back."""
    text = document.to_json()
    try:
        check_size(text.encode(), document.max_bytes)
    except CalibrationDocumentError as error:
        raise CalibrationDocumentError(f"{document.key}: {error}") from None
    return text


class CalibrationStore(ABC):
    """Documents by key. Safe for use from several threads; the opener closes it.

    Every method raises StoreUnavailableError or StoreRefusedError.
    """

    @abstractmethod
    def get(self, key: Key, *, renew: bool = False) -> Document | None:
        """The document, None when there is none. renew: a server goes by it, so its time to live
        starts anew. Raises CalibrationDocumentError for a bad one."""

    @abstractmethod
    def put(self, document: Document) -> Key:
        """Write under the document's own key, for the whole TTL.

        Raises CalibrationDocumentError for one that is too large to be read back.
        """

    @abstractmethod
    def delete(self, key: Key) -> bool:
        """Delete a document and return whether there was one."""

    @abstractmethod
    def list(self) -> tuple[StoredKey, ...]:
        """All keys, sorted, whatever their documents hold."""

    @abstractmethod
    def close(self) -> None:
        """Give connections back. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

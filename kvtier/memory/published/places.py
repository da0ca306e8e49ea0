"""The places of a server's prefix memories: a folder, or wherever the calibration store says.

--memory DIR      every memory in the directory, or the one that it is
--memory store    what is published for the model and its revision, each with its digest
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from kvtier.calibration.documents import MemoryDocument
from kvtier.calibration.store.opening import open_store
from kvtier.config import Settings
from kvtier.errors import MemoryFileError, MemoryMismatchError
from kvtier.heads.model.config import model_name, weights_revision
from kvtier.memory.published.publishing import published
from kvtier.memory.storage import PrefixMemory, directories, load, load_card, stored_bytes


class Place(NamedTuple):
    """The place of one memory, and the digest that it must have.

    digest:    sha256 of the file of its tensors
    num_bytes: that this file has
    name:      that it is published under; None: found in a folder
    """

    folder: Path
    digest: str
    num_bytes: int
    name: str | None = None

    def __str__(self) -> str:
        return str(self.folder) if self.name is None else f"{self.name!r} in {self.folder}"

    def read(self) -> PrefixMemory:
        """Raises MemoryFileError, and MemoryMismatchError for another memory than it must be."""
        memory = load(self.folder)
        if memory.card.digest != self.digest:
            known = "found there first" if self.name is None else "published"
            raise MemoryMismatchError(
                f"memory {self.digest[:16]} was {known}, but the directory holds {memory.digest}"
            )
        return memory


class MemoryFinder(Protocol):
    """Knows which memories a server is to serve now."""

    def find(self) -> list[Place]:
        """Raises MemoryFileError; where they are published StoreError and
        CalibrationDocumentError, too."""
        ...


class MemoryFolder:
    """The memory that a directory is, or those that are in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self) -> list[Place]:
        return [
            Place(directory, load_card(directory).digest, stored_bytes(directory))
            for directory in directories(self._folder)
        ]


class PublishedMemories:
    """The memories that the calibration store has for a model with exactly the weights that it has
    now."""

    def __init__(self, settings: Settings, model_path: str) -> None:
        self._settings, self._model_path = settings, model_path

    @cached_property
    def _model(self) -> tuple[str, str | None]:
        """Name and revision. All weights are read for it, so that is done once."""
        return model_name(self._model_path), weights_revision(self._model_path)

    def find(self) -> list[Place]:
        with open_store(self._settings) as store:
            documents = published(store, *self._model)
        return [_place_of(document) for document in documents]


def _place_of(document: MemoryDocument) -> Place:
    folder = Path(document.location)
    try:
        return Place(folder, document.digest, stored_bytes(folder), document.name)
    except MemoryFileError as error:
        raise MemoryFileError(f"published prefix memory {document.name!r}: {error}") from error


def memory_finder(settings: Settings, model_path: str) -> MemoryFinder:
    """Return the finder that `settings.memory` means for a model, where it is set."""
    folder = settings.memory_folder
    return PublishedMemories(settings, model_path) if folder is None else MemoryFolder(folder)


__all__ = ["MemoryFinder", "MemoryFolder", "Place", "PublishedMemories", "memory_finder"]

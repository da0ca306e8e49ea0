"""Prefix memories that servers find: published in the calibration store, or in a folder.

--memory DIR      every memory in the directory, or the one that it is
--memory store    what is published for the model and its revision, each with its digest

What is published names a directory and the digest of the tensors in it: a directory that holds
another memory later is none of what was published.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from kvtier.calibration.documents import (
    NAME_CHARACTERS,
    MemoryDocument,
    is_location,
    is_memory_name,
)
from kvtier.calibration.keys import UNKNOWN, Key
from kvtier.calibration.store.base import CalibrationStore, StoredKey
from kvtier.calibration.store.directory import open_store
from kvtier.calibration.store.transfer import import_documents
from kvtier.config import Settings
from kvtier.errors import MemoryFileError, MemoryMismatchError, UsageError
from kvtier.heads.model.config import model_name, weights_revision
from kvtier.memory.storage import (
    CARD,
    Card,
    PrefixMemory,
    check_may_be_served,
    directories,
    load,
    load_card,
    stored_bytes,
)


def publish(
    store: CalibrationStore, folder: Path, name: str, location: str | None = None
) -> tuple[Key, str]:
    """Store what a directory holds under a name of its model's; returns the key, and whether it is
    new, replaced another one, or was there (unchanged).

    location: the directory as servers see it; None: as it is seen here.

    Raises UsageError, MemoryFileError for a damaged memory, MemoryMismatchError for one whose card
    says that it must not be served, and StoreError.
    """
    if not is_memory_name(name):
        expected = f"printable text of 1 to {NAME_CHARACTERS} characters, no spaces around it"
        raise UsageError("--name", expected, name)
    if location is not None and not is_location(location):
        raise UsageError("--location", "an absolute path", location)
    if not (folder / CARD).is_file():
        expected = "the directory of one prefix memory, which `kvtier memory build` writes"
        raise UsageError("DIR", expected, str(folder))
    try:
        # All of it, or servers would be the first to see that it is damaged.
        card = load(folder).card
        check_may_be_served(card)
    except MemoryFileError as error:
        raise type(error)(f"DIR: {error}") from error
    here = os.path.abspath(folder)
    if location is None and not is_location(here):
        raise UsageError("DIR", "a directory whose path is printable", here)
    document = document_of(card, name, location or here)
    for other in published(store, document.key.model, document.key.revision):
        if other.name != name and other.prefix_digest == document.prefix_digest:
            expected = f"the name {other.name!r}, under which this prefix has a memory already"
            raise UsageError("--name", expected, name)
    return import_documents(store, [document])[0]


def document_of(card: Card, name: str, location: str) -> MemoryDocument:
    """Return the document that is stored of a memory: nothing that it holds, and no more of its
    card than one looks at first."""
    from kvtier.memory.making import HELD_OUT
    from kvtier.memory.measured import EXACT, MEMORY

    rows = {row.way: row for row in card.rows.get(HELD_OUT, ())}
    mine, exact, identity = rows.get(MEMORY), rows.get(EXACT), card.identity
    nll_gap = held_share = None
    if mine is not None and exact is not None:
        nll_gap, held_share = mine.nll_gap, mine.bytes_held / exact.bytes_held
    return MemoryDocument(
        model=identity.model,
        revision=identity.revision,
        created_at=card.created_at,
        name=name,
        location=location,
        digest=card.digest,
        prefix_digest=identity.prefix_digest,
        prefix_tokens=identity.prefix_tokens,
        dtype=identity.dtype,
        requeue_above=card.requeue_above,
        nll_gap=nll_gap,
        held_share=held_share,
    )


def memory_keys(store: CalibrationStore) -> list[StoredKey]:
    """Return the keys of all that is published, for all models."""
    return [stored for stored in store.list() if stored.key.kind == "memory"]


def published(
    store: CalibrationStore, model: str, revision: str | None, *, renew: bool = False
) -> list[MemoryDocument]:
    """Return the memories that are published for a model with exactly these weights, by name.
    renew: a server serves them, so their time to live starts anew. Raises StoreError, and
    CalibrationDocumentError for one that cannot be read."""
    mine = (model, revision or UNKNOWN)
    keys = [one.key for one in memory_keys(store) if (one.key.model, one.key.revision) == mine]
    found = [store.get(key, renew=renew) for key in keys]
    # One that is None was withdrawn since it was listed.
    return [document for document in found if isinstance(document, MemoryDocument)]


def withdraw(store: CalibrationStore, name: str) -> Key:
    """Delete what is published under a name that one model has; returns its key. Raises UsageError
    for a name that none has, or several."""
    keys = [one.key for one in memory_keys(store) if one.key.name == name]
    if not keys:
        raise UsageError("NAME", "what is published (see `kvtier memory list`)", name)
    if len(keys) > 1:
        several = " ".join(map(str, keys))
        expected = f"a name that one model has; `kvtier calibration delete` takes one of {several}"
        raise UsageError("NAME", expected, name)
    store.delete(keys[0])
    return keys[0]


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


class MemoryFinder:
    """Knows which memories a server is to serve now: that which a directory is, or those that are
    in it; or those that the calibration store has for a model with exactly the weights that it has
    now."""

    def __init__(self, settings: Settings, model_path: str) -> None:
        """settings: those of a server whose `memory` is set."""
        self._settings, self._model_path = settings, model_path

    @cached_property
    def _model(self) -> tuple[str, str | None]:
        """Name and revision. All weights are read for it, so that is done once."""
        return model_name(self._model_path), weights_revision(self._model_path)

    def find(self) -> list[Place]:
        """Raises MemoryFileError; where they are published StoreError and
        CalibrationDocumentError, too."""
        folder = self._settings.memory_folder
        if folder is not None:
            return [
                Place(directory, load_card(directory).digest, stored_bytes(directory))
                for directory in directories(folder)
            ]
        with open_store(self._settings) as store:
            documents = published(store, *self._model, renew=True)
        return [_place_of(document) for document in documents]


def _place_of(document: MemoryDocument) -> Place:
    folder = Path(document.location)
    try:
        return Place(folder, document.digest, stored_bytes(folder), document.name)
    except MemoryFileError as error:
        raise MemoryFileError(f"published prefix memory {document.name!r}: {error}") from error

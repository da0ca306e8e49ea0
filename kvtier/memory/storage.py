"""A memory's directory.

    memory.json           its card (card.py), readable without tensors
    memory.safetensors    the prefix's token ids, and every layer's tensors

The card names the digest of the tensors' file, so a memory is read whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field, ValidationError

from kvtier.calibration.documents import Stored
from kvtier.errors import MemoryFileError, MemoryMismatchError, UsageError
from kvtier.memory.card import Identity, Row
from kvtier.reading import first_problem, read_json
from kvtier_kernels.memory.base import PLACE_WIDTH, MemoryLayer

CARD, TENSORS = "memory.json", "memory.safetensors"
# These tensors are held in the model's dtype; the others are numbers of another kind.
IN_MODEL_DTYPE = ("o", "kept_k", "kept_v")
_PREFIX = "prefix_ids"


class Card(Stored):
    """The content of `memory.json`.

    recipe:       how it was made (building.Recipe), and with what seed
    requeue_above: share of a prompt's lookups that fall back above which a request is read with the
                  exact prefix
    traces:       how many made it, and judged it
    least_members: of its entries, how few queries one stands for; 1 and few more may be read back
    build_seconds: with loading the model, without measuring
    rows:         what requests lose, by what was asked and by how the prefix is held
    target_nats:  the most that the answers of held-out requests may lose
    refusals:     why it must not be served; empty where it may be
    digest:       sha256 of the tensors' file
    """

    identity: Identity
    recipe: dict[str, int | float | None]
    requeue_above: float = Field(ge=0, le=1)
    traces: dict[str, int]
    least_members: int = Field(ge=1)
    positions: int = Field(ge=0)
    build_seconds: float = Field(ge=0)
    rows: dict[str, list[Row]]
    target_nats: float = Field(ge=0)
    refusals: list[str]
    digest: str = ""


@dataclass(frozen=True)
class PrefixMemory:
    """A memory as it is served. layers: N = 1 each, on the CPU."""

    card: Card
    prefix_ids: tuple[int, ...]
    layers: tuple[MemoryLayer, ...]

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that name it."""
        return self.card.digest[:16]

    def of_heads(self, heads: range) -> PrefixMemory:
        """Return the part of the memory that a tensor parallel rank with these of the KV heads
        holds."""
        mine = tuple(layer_of_heads(layer, heads) for layer in self.layers)
        return PrefixMemory(self.card, self.prefix_ids, mine)


def layer_of_heads(layer: MemoryLayer, heads: range) -> MemoryLayer:
    """Return some KV heads of a layer with N = 1; the projections of all such parts add up."""
    part = slice(heads.start, heads.stop)
    begin, end = (int(layer.kept_indptr[at]) for at in (heads.start, heads.stop))
    return layer._replace(
        projection=layer.projection[:, :, part],
        o=layer.o[:, part],
        lse=layer.lse[:, part],
        looks_up=layer.looks_up[:, part],
        kept_k=layer.kept_k[begin:end],
        kept_v=layer.kept_v[begin:end],
        kept_indptr=layer.kept_indptr[heads.start : heads.stop + 1] - begin,
    )


def save(
    folder: Path, card: Card, prefix_ids: Sequence[int], layers: Sequence[MemoryLayer]
) -> Card:
    """Write a memory's directory; returns the card with its digest. The card comes last, so that a
    directory with one is whole. Raises OSError."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, card.identity.dtype)
    tensors = {_PREFIX: torch.tensor(list(prefix_ids), dtype=torch.int64)}
    for at, layer in enumerate(layers):
        for name, tensor in layer._asdict().items():
            held = tensor.to(dtype) if name in IN_MODEL_DTYPE else tensor
            tensors[f"{at}.{name}"] = held.cpu().contiguous()
    (folder / CARD).unlink(missing_ok=True)
    save_file(tensors, folder / TENSORS)
    card = card.model_copy(update={"digest": _sha256(folder / TENSORS)})
    part = folder / f"{CARD}.part"
    part.write_text(card.to_json() + "\n")
    os.replace(part, folder / CARD)
    return card


def directories(folder: Path) -> list[Path]:
    """The memories' directories that a folder is, or has in it. Raises MemoryFileError for none."""
    if (folder / CARD).exists():
        return [folder]
    found = sorted(card.parent for card in folder.glob(f"*/{CARD}"))
    if not found:
        raise MemoryFileError(f"{folder}: no prefix memory, which `kvtier memory build` writes")
    return found


def stored_bytes(folder: Path) -> int:
    """Return the bytes that a memory's tensors take, or those of all memories in a folder. Raises
    MemoryFileError."""
    try:
        return sum((directory / TENSORS).stat().st_size for directory in directories(folder))
    except OSError as error:
        raise MemoryFileError(f"{folder}: {error}") from error


def check_may_be_served(card: Card) -> None:
    """Raises MemoryMismatchError for a memory whose card says that it must not be."""
    if card.refusals:
        raise MemoryMismatchError(
            f"memory {card.digest[:16]}: its card says that it must not be served: "
            + "; ".join(card.refusals)
        )


def load_card(folder: Path) -> Card:
    """Raises MemoryFileError where there is none that can be read."""
    try:
        return Card.model_validate(read_json(folder / CARD, "memory"))
    except UsageError as error:
        raise MemoryFileError(str(error)) from error
    except ValidationError as error:
        problem = first_problem(error, "card")
        raise MemoryFileError(f"{folder / CARD}: {problem}") from error


def load(folder: Path) -> PrefixMemory:
    """Raises MemoryFileError for a directory that is not a whole memory."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    card, file = load_card(folder), folder / TENSORS
    try:
        if _sha256(file) != card.digest:
            raise MemoryFileError(f"{file}: not the tensors that {CARD} was written with")
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise MemoryFileError(f"{file}: {error}") from error
    shape = card.identity.shape
    try:
        layers = tuple(
            MemoryLayer(**{name: tensors[f"{at}.{name}"] for name in MemoryLayer._fields})
            for at in range(shape.num_layers)
        )
        prefix = tuple(tensors[_PREFIX].tolist())
    except KeyError as error:
        raise MemoryFileError(f"{file}: no tensor {error}") from error
    for at, layer in enumerate(layers):
        _check_shapes(f"{file}, layer {at}", layer, card)
    if len(prefix) != card.identity.prefix_tokens:
        raise MemoryFileError(f"{file}: {len(prefix)} prefix tokens")
    return PrefixMemory(card, prefix, layers)


def _check_shapes(where: str, layer: MemoryLayer, card: Card) -> None:
    """Raises MemoryFileError for tensors that do not fit each other."""
    shape = card.identity.shape
    heads, group, dim = shape.num_kv_heads, shape.group_size, shape.head_dim
    entries, width = len(layer.keys), layer.projection.shape[1]
    kept = len(layer.kept_k)
    expected: dict[str, tuple[int, ...]] = {
        "projection": (1, width, heads, group, dim),
        "keys": (entries, width + PLACE_WIDTH),
        "key_indptr": (2,),
        "place_weight": (1,),
        "nearness": (1,),
        "prefix_tokens": (1,),
        "o": (entries, heads, group, dim),
        "lse": (entries, heads, group),
        "looks_up": (1, heads),
        "kept_k": (kept, dim),
        "kept_v": (kept, dim),
        "kept_indptr": (heads + 1,),
    }
    for name, wanted in expected.items():
        found = tuple(getattr(layer, name).shape)
        if found != wanted:
            raise MemoryFileError(f"{where}, {name}: expected shape {wanted}, got {found}")
    for name, bounds, last in (
        ("key_indptr", layer.key_indptr, entries),
        ("kept_indptr", layer.kept_indptr, kept),
    ):
        if int(bounds[0]) or int(bounds[-1]) != last or (bounds.diff() < 0).any():
            raise MemoryFileError(f"{where}, {name}: expected 0 to {last}, got {bounds.tolist()}")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

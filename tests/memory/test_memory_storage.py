"""A memory's directory: what is written comes back, and what was damaged or is of another model is
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_memories import a_card, a_layer, write_memory
from text_models import write_llama

from kvtier.errors import MemoryFileError, MemoryMismatchError
from kvtier.memory.card import Identity
from kvtier.memory.storage import CARD, TENSORS, directories, load, save, stored_bytes
from kvtier_kernels.memory.base import MemoryLayer


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


PREFIX = [7, 3, 11, 5]


@pytest.fixture
def folder(tmp_path, model_path) -> Path:
    write_memory(model_path, tmp_path / "memory", PREFIX)
    return tmp_path / "memory"


def test_a_memory_comes_back_as_it_was(tmp_path, model_path):
    card = a_card(model_path, PREFIX)
    shape = card.identity.shape
    layers = [a_layer(shape, [seed]) for seed in range(shape.num_layers)]
    save(tmp_path, card, PREFIX, layers)
    memory = load(tmp_path)
    assert list(memory.prefix_ids) == PREFIX
    assert memory.card == card.model_copy(update={"digest": memory.card.digest})
    assert len(memory.digest) == 16
    for mine, before in zip(memory.layers, layers, strict=True):
        for name, tensor in before._asdict().items():
            assert torch.equal(getattr(mine, name), tensor), name


def test_heads_of_a_rank_are_a_part_of_all(folder):
    memory = load(folder)
    heads = memory.card.identity.shape.num_kv_heads
    parts = [memory.of_heads(range(head, head + 1)) for head in range(heads)]
    for at, layer in enumerate(memory.layers):
        mine = [part.layers[at] for part in parts]
        assert torch.equal(torch.cat([one.o for one in mine], dim=1), layer.o)
        assert torch.equal(torch.cat([one.kept_k for one in mine]), layer.kept_k)
        assert torch.equal(torch.cat([one.projection for one in mine], dim=2), layer.projection)
        counts = torch.cat([one.kept_indptr.diff() for one in mine])
        assert torch.equal(counts, layer.kept_indptr.diff())


def test_a_folder_of_memories_is_all_of_them(folder):
    assert directories(folder) == [folder]
    assert directories(folder.parent) == [folder]
    assert stored_bytes(folder.parent) == (folder / TENSORS).stat().st_size
    with pytest.raises(MemoryFileError, match="no prefix memory"):
        directories(folder.parent.parent / "nowhere")


def damage(folder: Path, kind: str) -> None:
    card, tensors = folder / CARD, folder / TENSORS
    fields: dict[str, Any] = json.loads(card.read_text())
    if kind == "no card":
        card.unlink()
    elif kind == "an unknown field":
        card.write_text(json.dumps(fields | {"else": 1}))
    elif kind == "no tensors":
        tensors.unlink()
    else:
        tensors.write_bytes(tensors.read_bytes()[:-1] + b"x")


@pytest.mark.parametrize("kind", ["no card", "an unknown field", "no tensors", "other tensors"])
def test_a_damaged_memory_is_refused(folder, kind):
    damage(folder, kind)
    with pytest.raises(MemoryFileError):
        load(folder)


@pytest.mark.parametrize("name", MemoryLayer._fields)
def test_tensors_that_do_not_fit_each_other_are_refused(tmp_path, model_path, name):
    card = a_card(model_path, PREFIX)
    first, *others = (a_layer(card.identity.shape, PREFIX) for _ in range(2))
    tensor = getattr(first, name)
    longer = torch.cat([tensor, tensor[-1:] + 1 if tensor.dtype == torch.int32 else tensor[-1:]])
    save(tmp_path, card, PREFIX, [first._replace(**{name: longer}), *others])
    with pytest.raises(MemoryFileError, match="layer 0"):
        load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"revision": "0" * 16}, {"tokenizer": "0"}, {"rotation": "0"}, {"dtype": "bfloat16"},
     {"prefix_digest": "0"}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_memory_of_another_model_or_prefix_is_refused(model_path, change):
    mine = Identity.of(str(model_path), "float32", PREFIX)
    served = Identity.of(str(model_path), "float32", PREFIX)
    mine.check_serves(served)
    with pytest.raises(MemoryMismatchError, match=next(iter(change))):
        mine.model_copy(update=change).check_serves(served)
    with pytest.raises(MemoryMismatchError, match="prefix_tokens"):
        mine.check_serves(served.with_prefix([*PREFIX, 1]))

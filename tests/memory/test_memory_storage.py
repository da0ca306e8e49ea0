"""A memory's directory: what is written comes back, and what was damaged or is of another model is
refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from text_models import write_llama

from kvtier.errors import MemoryFileError, MemoryMismatchError
from kvtier.heads.model.loading import load_model
from kvtier.memory.building import build
from kvtier.memory.card import Identity
from kvtier.memory.recipe import Recipe
from kvtier.memory.storage import (
    CARD,
    TENSORS,
    Card,
    check_may_be_served,
    directories,
    load,
    load_card,
    save,
    stored_bytes,
)
from kvtier.memory.traces import Trace
from kvtier_kernels.memory.base import MemoryLayer


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def made(model_path) -> tuple[Card, list[int], tuple[MemoryLayer, ...]]:
    rng = random.Random(0)
    prefix = [rng.randrange(10, 600) for _ in range(40)]
    traces = [Trace(tuple(rng.randrange(10, 600) for _ in range(9)), ()) for _ in range(12)]
    built = build(
        load_model(str(model_path)), prefix, traces, Recipe(0.2, 12, state_heads=0.5, key_width=6)
    )
    card = Card(
        model="model", identity=Identity.of(str(model_path), "float32", prefix), recipe={"seed": 0},
        requeue_above=0.5, traces={"making": 9}, least_members=1, positions=9, build_seconds=1.0,
        rows={}, target_nats=0.05, refusals=[],
    )  # fmt: skip
    return card, prefix, built.layers


@pytest.fixture
def folder(tmp_path, made) -> Path:
    save(tmp_path / "memory", *made)
    return tmp_path / "memory"


def test_a_memory_comes_back_as_it_was(folder, made):
    card, prefix, layers = made
    memory = load(folder)
    assert list(memory.prefix_ids) == prefix
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
    elif kind == "half a card":
        card.write_text(card.read_text()[:100])
    elif kind == "an unknown field":
        card.write_text(json.dumps(fields | {"else": 1}))
    elif kind == "no number":
        card.write_text(json.dumps(fields | {"requeue_above": float("nan")}))
    elif kind == "no tensors":
        tensors.unlink()
    elif kind == "other tensors":
        tensors.write_bytes(tensors.read_bytes()[:-1] + b"x")
    else:
        raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    ["no card", "half a card", "an unknown field", "no number", "no tensors", "other tensors"],
)
def test_a_damaged_memory_is_refused(folder, kind):
    damage(folder, kind)
    with pytest.raises(MemoryFileError):
        load(folder)


@pytest.mark.parametrize("name", MemoryLayer._fields)
def test_tensors_that_do_not_fit_each_other_are_refused(tmp_path, made, name):
    card, prefix, layers = made
    tensor = getattr(layers[0], name)
    longer = torch.cat([tensor, tensor[-1:] + 1 if tensor.dtype == torch.int32 else tensor[-1:]])
    save(tmp_path / "memory", card, prefix, [layers[0]._replace(**{name: longer}), *layers[1:]])
    with pytest.raises(MemoryFileError, match="layer 0"):
        load(tmp_path / "memory")


@pytest.mark.parametrize(
    "change",
    [{"revision": "0" * 16}, {"tokenizer": "0"}, {"rotation": "0"}, {"dtype": "bfloat16"},
     {"prefix_digest": "0"}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_memory_of_another_model_or_prefix_is_refused(model_path, made, change):
    card, prefix, _ = made
    served = Identity.of(str(model_path), "float32", prefix)
    card.identity.check_serves(served)
    other = card.identity.model_copy(update=change)
    with pytest.raises(MemoryMismatchError, match=next(iter(change))):
        other.check_serves(served)
    longer = served.with_prefix([*prefix, 1])
    assert longer == Identity.of(str(model_path), "float32", [*prefix, 1]).model_copy(
        update={"created_at": longer.created_at}
    )
    with pytest.raises(MemoryMismatchError, match="prefix_tokens"):
        card.identity.check_serves(longer)


def test_what_its_card_forbids_is_not_served(folder):
    card = load_card(folder)
    check_may_be_served(card)
    with pytest.raises(MemoryMismatchError, match="too far"):
        check_may_be_served(card.model_copy(update={"refusals": ["too far"]}))

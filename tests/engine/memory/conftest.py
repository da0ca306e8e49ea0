"""Memories of the demo model in directories, and the settings of an engine that serves them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from compressing import RULE_ENV
from engine_process import DEMO_MODEL
from stored_memories import Stored, tokens

from kvtier.heads.model.loading import load_model
from kvtier.memory.building import build
from kvtier.memory.card import Identity
from kvtier.memory.recipe import Recipe
from kvtier.memory.storage import Card, load, save
from kvtier.memory.traces import Trace


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(str(DEMO_MODEL))


@pytest.fixture(scope="module")
def stored(model, tmp_path_factory) -> list[Stored]:
    """Two memories of other lengths, with other numbers of entries and widths of lookups."""
    parent = tmp_path_factory.mktemp("memories")
    return [
        make_memory(model, parent / "long", 500, Recipe(0.12, 96, 0.75, 24, 0.2), seed=1),
        make_memory(model, parent / "short", 150, Recipe(0.3, 40, 0.5, 7, 0.0), seed=2),
    ]


def make_memory(model: Any, folder: Path, length: int, recipe: Recipe, seed: int) -> Stored:
    rng = random.Random(seed)
    prefix = tokens(rng, length)
    traces = [
        Trace(tuple(tokens(rng, rng.randrange(8, 30))), tuple(tokens(rng, 4))) for _ in range(24)
    ]
    built = build(model, prefix, traces, recipe)
    card = Card(
        model="kvtier-demo", identity=Identity.of(str(DEMO_MODEL), "float32", prefix), recipe={},
        requeue_above=1.0, traces={}, least_members=1, positions=34, build_seconds=0, rows={},
        target_nats=1, refusals=[],
    )  # fmt: skip
    save(folder, card, prefix, built.layers)
    return Stored(folder, load(folder))


@pytest.fixture
def env(stored) -> dict[str, str]:
    return {
        **RULE_ENV,
        "KVTIER_MEMORY": str(stored[0].folder.parent),
        "KVTIER_HEAD_PROFILE": str(DEMO_MODEL / "head_profile.json"),
    }

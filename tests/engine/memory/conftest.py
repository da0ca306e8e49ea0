"""Memories of the demo model in directories, and the settings of an engine that serves them."""

from __future__ import annotations

from typing import Any

import pytest
from compressing import RULE_ENV
from engine_process import DEMO_MODEL
from memory_samples import Stored, make_memory

from kvtier.heads.model.loading import load_model
from kvtier.memory.recipe import Recipe


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


@pytest.fixture
def env(stored) -> dict[str, str]:
    return {
        **RULE_ENV,
        "KVTIER_MEMORY": str(stored[0].folder.parent),
        "KVTIER_HEAD_PROFILE": str(DEMO_MODEL / "head_profile.json"),
    }

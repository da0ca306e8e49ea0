"""Fixtures of the bench's tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from bench_models import FAKE_WORKER, make_profile, write_model

from kvtier.bench import runner


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No KVTIER_* setting of the developer reaches a test."""
    for name in [name for name in os.environ if name.startswith("KVTIER_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """A model directory with a head profile of its own."""
    folder = write_model(tmp_path / "model")
    make_profile().save(folder / "head_profile.json")
    return folder


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers have an engine of a few lines."""
    monkeypatch.setattr(runner, "WORKER_COMMAND", (sys.executable, FAKE_WORKER))

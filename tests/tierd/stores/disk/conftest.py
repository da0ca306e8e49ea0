"""The place of a test's disk store."""

from __future__ import annotations

import pytest


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "disk"

"""Fixtures shared by the head tests."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_llama import tiny_model


@pytest.fixture(scope="session")
def model() -> Any:
    return tiny_model()

"""A link and its client, in a test's hands."""

from __future__ import annotations

import pytest
from link_harness import linked


@pytest.fixture
def both():
    with linked() as both:
        yield both


@pytest.fixture
def link(both):
    return both[0]


@pytest.fixture
def client(both):
    return both[1]

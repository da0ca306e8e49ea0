"""A client that shares the service's memory."""

from __future__ import annotations

import pytest
from live_tier import connected


@pytest.fixture
def client(tier):
    with connected(tier) as client:
        assert client.shares_memory
        yield client

"""A client that shares the service's memory."""

from __future__ import annotations

import pytest
from waiting import SAFETY_S

from kvtier.tier.client import TierClient


@pytest.fixture
def client(tier):
    with TierClient(tier.address, timeout_s=SAFETY_S) as client:
        client.connect()
        assert client.shares_memory
        yield client

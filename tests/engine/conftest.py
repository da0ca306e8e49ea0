"""A live tier and links to it; and the engine, imported."""

from __future__ import annotations

import warnings

import pytest
from tierd.live_tier import in_process
from waiting import SAFETY_S

from kvtier.tier.client import TierClient
from kvtier.tier.link.breaker import Breaker
from kvtier.tier.link.link import TierLink
from kvtier_tierd.stores.memory import MemoryOptions

# Importing the engine warns about hardware it does not find; that is not what we test.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang.srt.managers.schedule_batch
    import sglang.srt.model_executor.forward_batch_info  # noqa: F401


@pytest.fixture(scope="module")
def tier():
    with in_process(store=MemoryOptions(1 << 24)) as live:
        yield live


@pytest.fixture
def connect(tier, request):
    """Links to the tier in a namespace of the test's own, closed at its end."""
    links = []

    def make(client_class: type[TierClient] = TierClient, **options) -> TierLink:
        namespace = f"{request.node.name[:150]}"
        # Answers are waited for; tests that lose them say so.
        client = client_class(tier.address, namespace, **{"timeout_s": SAFETY_S, **options})
        links.append(TierLink(client, buffer_bytes=1 << 22, breaker=Breaker(first_s=0.01)))
        return links[-1]

    yield make
    for link in links:
        link.close()

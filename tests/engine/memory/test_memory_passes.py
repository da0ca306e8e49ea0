"""The lookups of passes, and what is told of them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import REGISTRY

from kvtier_sglang.memory.bank import NONE
from kvtier_sglang.memory.passes import Lookups, MemoryPasses
from kvtier_sglang.metrics import MemoryMetrics


class Bank(dict[str, int]):
    """The memory of each request."""

    def index_of(self, rid: str) -> int:
        return self.get(rid, NONE)


def batch(*requests: tuple[str, int], tokens: int = 2) -> SimpleNamespace:
    """Requests with their rows."""
    return SimpleNamespace(
        rids=[rid for rid, _ in requests],
        req_pool_indices=torch.tensor([row for _, row in requests]),
        extend_seq_lens_cpu=[tokens] * len(requests),
        positions=torch.zeros(tokens * len(requests), dtype=torch.int64),
    )


def layer(*nearness: float) -> SimpleNamespace:
    """Return a layer of memories with entries; NaN: one without."""
    entries = [0 if math.isnan(one) else 3 for one in nearness]
    return SimpleNamespace(
        key_indptr=torch.tensor([0, *entries]).cumsum(0), nearness=torch.tensor(nearness)
    )


def answer(*cosines: float, near: float) -> SimpleNamespace:
    found = torch.tensor(cosines)
    return SimpleNamespace(entry=torch.where(found < near, -1, 5), cosine=found)


def test_lookups_are_counted_where_there_are_entries_and_a_memory():
    """They are added up layer by layer, of the pass whose result is there: another may be under
    way, and passes without a memory are not remembered."""
    passes = MemoryPasses(Bank(both=0, one=1, later=0), None, rows=4)
    made = passes.extend(batch(("both", 1), ("one", 2), ("none", 3), tokens=1))
    made.lookups.add(answer(0.9, -math.inf, -math.inf, near=0.5), made.ids, layer(0.5, math.nan))
    made.lookups.add(answer(0.2, 0.3, -math.inf, near=0.4), made.ids, layer(0.4, 0.4))
    passes.extend(batch(("none", 3)))
    later = passes.extend(batch(("later", 1)))
    later.lookups.add(answer(0.1, 0.2, near=0.5), later.ids, layer(0.5))
    assert passes.lookups(["both", "one", "none"]) == {
        "both": Lookups(2, 1, pytest.approx(0.2)),
        "one": Lookups(1, 1, pytest.approx(-0.1)),
    }
    assert passes.lookups(["none"]) == {}
    assert passes.lookups(["later"]) == {"later": Lookups(2, 2, pytest.approx(-0.7))}
    assert passes.lookups(["later"]) == {}


def test_metrics_are_of_a_memory_and_do_not_end_the_server():
    metrics = MemoryMetrics("a model")
    metrics.prompt("m1", "answered", *Lookups(10, 4, 1.0))
    metrics.prompt("m1", "exact", *Lookups(10, 9, -1.0))

    def of(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(name, {"model_name": "a model", "memory": "m1", **labels})

    assert of("kvtier_memory_requests_total", outcome="exact") == 1
    assert of("kvtier_memory_lookups_total") == 20
    assert of("kvtier_memory_fell_back_total") == 13
    assert of("kvtier_memory_fallen_share_sum") == pytest.approx(1.3)
    assert of("kvtier_memory_cosine_margin_bucket", le="0.0") == 1
    # A full disk, or a number that is none.
    metrics.prompt("m1", "answered", *Lookups(0, 0))
    metrics.prompt("m1", "answered", *Lookups(10, 0))
    assert of("kvtier_memory_lookups_total") == 20

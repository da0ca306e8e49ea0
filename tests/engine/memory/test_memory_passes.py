"""The state of passes between each other: whose memory a row's request has, and which lookups fell
back in which pass."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import REGISTRY

from kvtier_sglang.memory.bank import NONE
from kvtier_sglang.memory.lookups import Lookups
from kvtier_sglang.memory.metrics import MemoryMetrics
from kvtier_sglang.memory.passes import MemoryPasses


class Bank:
    """Knows which request has which memory; `held`: how many there are."""

    def __init__(self) -> None:
        self.held = 1
        self.index: dict[str, int] = {}

    def __len__(self) -> int:
        return self.held

    def index_of(self, rid: str) -> int:
        return self.index.get(rid, NONE)


def batch(*requests: tuple[str, int], tokens: int = 2) -> SimpleNamespace:
    """Requests with their rows."""
    return SimpleNamespace(
        rids=[rid for rid, _ in requests],
        req_pool_indices=torch.tensor([row for _, row in requests]),
        extend_seq_lens_cpu=[tokens] * len(requests),
        positions=torch.zeros(tokens * len(requests), dtype=torch.int64),
    )


def test_a_row_never_remembers_the_memory_of_a_request_before():
    """This holds even where there was no memory at all when the later request was prefilled."""
    bank = Bank()
    passes = MemoryPasses(bank, None, rows=4)
    bank.index = {"first": 0}
    assert passes.extend(batch(("first", 3))).ids.tolist() == [0, 0]
    bank.held, bank.index = 0, {}
    assert passes.extend(batch(("plain", 3))) is None
    bank.held, bank.index = 1, {"second": 0}
    passes.extend(batch(("second", 1)))
    assert passes.decode(batch(("plain", 3), ("second", 1))).ids.tolist() == [NONE, 0]


def test_graphs_record_memories_only_where_there_are_some():
    """No memory is loaded behind what was recorded, see MemoryBank.check_loads."""
    bank = Bank()
    passes = MemoryPasses(bank, None, rows=4)
    decoding = SimpleNamespace(req_pool_indices=torch.tensor([1]), positions=torch.tensor([0]))
    assert passes.recorded(decoding).ids.tolist() == [NONE]
    bank.held, bank.is_recorded = 0, False
    assert passes.recorded(decoding) is None
    assert bank.is_recorded


def layer(*nearness: float) -> SimpleNamespace:
    """Return a layer of memories with entries; NaN: one without."""
    entries = [0 if math.isnan(one) else 3 for one in nearness]
    return SimpleNamespace(
        key_indptr=torch.tensor([0, *entries]).cumsum(0), nearness=torch.tensor(nearness)
    )


def answer(*cosines: float, near: float) -> SimpleNamespace:
    found = torch.tensor(cosines)
    return SimpleNamespace(entry=torch.where(found < near, -1, 5), cosine=found)


def test_lookups_are_those_of_the_pass_whose_result_is_there():
    """Another may be under way, and passes without a memory are not remembered."""
    bank = Bank()
    bank.index = {"a": 0, "b": 0, "c": 0}
    passes = MemoryPasses(bank, None, rows=4)
    for rid, cosines in (("a", (0.2, 0.9)), ("b", (0.1, 0.2)), ("c", (0.9, 1.0))):
        made = passes.extend(batch((rid, 1)))
        made.lookups.add(answer(*cosines, near=0.5), made.ids, layer(0.5))
    passes.extend(batch(("plain", 2)))
    assert passes.lookups(["a"]) == {"a": Lookups(2, 1, pytest.approx(0.1))}
    assert passes.lookups(["plain"]) == {}
    assert passes.lookups(["b"]) == {"b": Lookups(2, 2, pytest.approx(-0.7))}
    assert passes.lookups(["c"]) == {"c": Lookups(2, 0, pytest.approx(0.9))}
    assert passes.lookups(["c"]) == {}


def test_lookups_are_counted_where_there_are_entries_and_a_memory():
    """Layer by layer; a request in the same pass without a memory, or whose memory has no entries
    in a layer, is not asked there."""
    bank = Bank()
    bank.index = {"both": 0, "one": 1}
    passes = MemoryPasses(bank, None, rows=4)
    made = passes.extend(batch(("both", 1), ("one", 2), ("none", 3), tokens=1))
    made.lookups.add(answer(0.9, -math.inf, -math.inf, near=0.5), made.ids, layer(0.5, math.nan))
    made.lookups.add(answer(0.2, 0.3, -math.inf, near=0.4), made.ids, layer(0.4, 0.4))
    assert passes.lookups(["both", "one", "none"]) == {
        "both": Lookups(2, 1, pytest.approx(0.2)),
        "one": Lookups(1, 1, pytest.approx(-0.1)),
    }


def test_metrics_are_of_a_memory_and_do_not_end_the_server():
    metrics = MemoryMetrics("a model")
    metrics.prompt("m1", Lookups(10, 4, 1.0), "answered")
    metrics.prompt("m1", Lookups(10, 9, -1.0), "exact")

    def of(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(name, {"model_name": "a model", "memory": "m1", **labels})

    assert of("kvtier_memory_requests_total", outcome="exact") == 1
    assert of("kvtier_memory_lookups_total") == 20
    assert of("kvtier_memory_fell_back_total") == 13
    assert of("kvtier_memory_fallen_share_sum") == pytest.approx(1.3)
    assert of("kvtier_memory_cosine_margin_bucket", le="0.0") == 1
    # A full disk, or a number that is none.
    metrics.prompt("m1", Lookups(0, 0), "answered")
    metrics.prompt("m1", Lookups(10, 0), "answered")
    assert of("kvtier_memory_lookups_total") == 20

"""What passes remember between each other: whose memory a row's request has, and which lookups fell
back in which pass."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kvtier_sglang.memory.bank import NONE
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
    """Not even where there was no memory at all when the later request was prefilled."""
    bank = Bank()
    passes = MemoryPasses(bank, None, rows=4)
    bank.index = {"first": 0}
    assert passes.extend(batch(("first", 3))).ids.tolist() == [0, 0]
    bank.held, bank.index = 0, {}
    assert passes.extend(batch(("plain", 3))) is None
    bank.held, bank.index = 1, {"second": 0}
    passes.extend(batch(("second", 1)))
    assert passes.decode(batch(("plain", 3), ("second", 1))).ids.tolist() == [NONE, 0]


def test_lookups_are_those_of_the_pass_whose_result_is_there():
    """Another may be under way, and passes without a memory are not remembered."""
    bank = Bank()
    bank.index = {"a": 0, "b": 0, "c": 0}
    passes = MemoryPasses(bank, None, rows=4)
    have_entries = torch.tensor([True])
    for rid, fallen in (("a", 1), ("b", 2), ("c", 0)):
        entry = torch.tensor([-1] * fallen + [5] * (2 - fallen))
        made = passes.extend(batch((rid, 1)))
        made.answered.add(entry, have_entries, made.ids)
    passes.extend(batch(("plain", 2)))
    assert passes.fell_back(["a"]) == {"a": (2, 1)}
    assert passes.fell_back(["plain"]) == {}
    assert passes.fell_back(["b"]) == {"b": (2, 2)}
    assert passes.fell_back(["c"]) == {"c": (2, 0)}
    assert passes.fell_back(["c"]) == {}

"""The number of slots that SGLang's answer becomes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvtier.errors import StartupError
from kvtier.heads.profile import ModelShape
from kvtier.pool_sizing import TABLE_BYTES, slot_bytes
from kvtier.retention.shares import PAGE
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool
from kvtier_sglang.runtime import size_pool

SHAPE = ModelShape(num_layers=3, num_kv_heads=4, num_attention_heads=8, head_dim=32)
TOKEN_BYTES = 3 * 4 * 2 * 32 * 4
CONFIGURATOR = SimpleNamespace(kv_cache_dtype=torch.float32)


def sized(budget: int, *, cap: int = 1 << 40, counted: int = TOKEN_BYTES) -> int:
    """Return the slots where SGLang counts so many bytes for a token, and makes at most `cap`
    slots."""

    def config_from_budget(configurator, budget_bytes):
        slots = min(budget_bytes // counted, cap)
        return SimpleNamespace(max_total_num_tokens=slots)

    return size_pool(
        config_from_budget, CONFIGURATOR, budget, SHAPE, state_width=2, votes=1
    ).max_total_num_tokens


def test_slots_and_what_is_kept_beside_them_fit_the_budget():
    per_slot = slot_bytes(SHAPE, 4, state_width=2, votes=1) + TABLE_BYTES
    assert per_slot == TOKEN_BYTES + 4 * (2 * 12 + 1) + 8 + 4 * 12 + TABLE_BYTES
    assert sized(1000 * per_slot + 5) == 1000
    assert sized(10**9, cap=77) == 77


def test_slots_that_cost_less_than_they_do_are_refused():
    with pytest.raises(StartupError, match="does not count 3072 bytes for a token"):
        sized(10**9, counted=TOKEN_BYTES // 2)


@pytest.mark.parametrize(("bits", "most"), [(None, 89_478_480), (8, 44_739_232)])
def test_more_slots_than_packed_spans_can_name_are_refused(bits, most):
    """The last pages of as many have numbers of their own."""

    def pool(size: int) -> HeadPagedKVPool:
        return HeadPagedKVPool(
            size, shape=SHAPE, dtype=torch.float32, device="meta", packs=True, bits=bits
        )

    packed = pool(most - 1).packed
    slots, columns = torch.arange(most - PAGE, most), 12
    span = packed.span(slots, [packed.page] * columns, coded=packed.coded)
    assert span.pages.tolist() == [(at + 1) * most // PAGE - 1 for at in range(columns)]
    with pytest.raises(StartupError, match=f"^--max-total-tokens: expected at most {most - 1} "):
        pool(most)

"""The occupancy of the pools, for the server's internal state, whatever pools it has."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from kvtier_sglang.pool.allocator import BundleAllocator


class Occupancy:
    """The occupancy of one process's pools: now, and at most since that was last read; and how many
    cached tokens have been evicted."""

    def __init__(self) -> None:
        self._peak_bytes = 0
        self._evicted_tokens = 0

    def observe_peak(
        self, result: torch.Tensor, tree_cache: Any, *args: Any, **kwargs: Any
    ) -> None:
        """AFTER alloc_token_slots: remember the highest occupancy since it was last read.

        Runs in every SGLang process, whatever pools it has, so it must never fail one.
        """
        with contextlib.suppress(Exception):
            used = used_bytes(tree_cache.token_to_kv_pool_allocator)
            self._peak_bytes = max(self._peak_bytes, used)

    def count_evicted(
        self, result: None, tree_cache: Any, num_evicted: int, *args: Any, **kwargs: Any
    ) -> None:
        """AFTER update_eviction_metrics, which every radix cache calls when it has evicted."""
        self._evicted_tokens += num_evicted

    def report_state(self, result: Any, controller: Any, state: dict[str, Any]) -> None:
        """AFTER _add_memory_usage: pool occupancy under internal_states[*]["kvtier"].

        Absent where the pools are of a kind that cannot be read this way.
        """
        with contextlib.suppress(Exception):
            state["kvtier"] = self._report(controller.scheduler)
            self._peak_bytes = 0

    def _report(self, scheduler: Any) -> dict[str, Any]:
        allocator = scheduler.token_to_kv_pool_allocator
        used = used_bytes(allocator)
        report: dict[str, Any] = {
            "kv_used_bytes": used,
            "kv_peak_bytes": max(self._peak_bytes, used),
            "kv_capacity_bytes": pool_bytes(allocator),
            "kv_evicted_tokens": self._evicted_tokens,
            "slots": allocator.size,
            "slots_used": allocator.size - allocator.available_size(),
        }
        if isinstance(allocator, BundleAllocator):
            # Behind one such allocator there is always kvtier's cache.
            report |= scheduler.tree_cache.report()
        return report


def pool_bytes(allocator: Any) -> int:
    """Bytes of the pool's buffers; some of SGLang's pools report K and V apart, some together."""
    size = allocator.get_kvcache().get_kv_size_bytes()
    return int(sum(size)) if isinstance(size, tuple) else int(size)


def used_bytes(allocator: Any) -> int:
    """Bytes of the slots in use, cached prefixes included."""
    if isinstance(allocator, BundleAllocator):
        return allocator.used_bytes()
    # The padding slot is part of the buffers but never of the occupancy.
    per_slot = pool_bytes(allocator) // (allocator.size + 1)
    return int((allocator.size - allocator.available_size()) * per_slot)

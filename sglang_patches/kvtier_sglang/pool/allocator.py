"""Slot accounting for kvtier's pool: SGLang's list of free slots, with whole bundles first.

Sixteen slots that follow each other are a *bundle* (pool/packed.py). What is compressed keeps whole
bundles, so prompts take whole ones, and what is generated takes single slots where there are.

Handing out slots asks the device for nothing, or every decoding step would wait for the one in
flight: a number is written by `index_fill_`, as `x[slots] = 0` copies it from the host and waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from kvtier.pool_sizing import IN_FLIGHT_SHARE
from kvtier.retention.shares import PAGE
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool


class BundleAllocator(TokenToKVPoolAllocator):
    """An allocator of slots, whole bundles first. Not thread-safe: the scheduler thread owns it."""

    free_pages: torch.Tensor
    release_pages: torch.Tensor

    def __init__(self, pool: HeadPagedKVPool) -> None:
        self.changed = True
        # True where tokens may have no slot: what compression took, or a memory stands for.
        self.has_gaps = pool.packed is not None
        # The tree replaces this by its own check, which includes ours.
        self.owner_check: Callable[[], list[str]] = self.check_integrity
        # Slots that a prompt of so many tokens holds at most; the tree knows of fewer.
        self.prompt_slots: Callable[[int], int] = int
        super().__init__(pool.size, pool.dtype, pool.device, pool, False)

    @property
    def pool(self) -> HeadPagedKVPool:
        return self._kvcache

    def clear(self) -> None:
        super().clear()
        if self.pool.packed is not None:
            self.pool.packed.clear()
        self.unsorted = False
        self.changed = True

    @rank_consensus(
        same_params=["need_size"], same_results=["result if result is None else result.tolist()"]
    )
    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Slots for new tokens; None where there are not enough."""
        if self.unsorted and need_size > 1:
            self._sort_free_list()
        self.changed = True
        slots = self._take(need_size)
        if slots is not None:
            self.pool.forget_scores(slots)
        return slots

    def _take(self, need_size: int) -> torch.Tensor | None:
        """Whole bundles are for prompts: what is generated takes single slots where there are."""
        if self.pool.packed is None or not 0 < need_size < min(PAGE, len(self.free_pages)):
            return super().alloc(need_size)
        slots = self.free_pages[-need_size:]
        self.free_pages = self.free_pages[:-need_size]
        return slots

    def _sort_free_list(self) -> None:
        """A sorted free list gives long contexts long contiguous runs, which attention reads
        in place instead of gathering. Slots of whole bundles come first."""
        self.free_pages = torch.sort(self.free_pages).values
        if self.pool.packed is not None:
            bundle = self.free_pages // PAGE
            counts = torch.zeros(self.size // PAGE + 1, dtype=torch.int64, device=self.device)
            loose = counts.index_add_(0, bundle, torch.ones_like(bundle))[bundle] < PAGE
            self.free_pages = self.free_pages[torch.argsort(loose.int(), stable=True)]
            self._whole = PAGE * (counts == PAGE).sum()
        self.unsorted = False

    def free(self, free_index: torch.Tensor) -> None:
        """free_index: of any integer type: SGLang frees what an aborted or retracted request has
        straight from its row of int32. 0 where a token has no slot any more."""
        free_index = free_index.to(torch.int64)
        if self.has_gaps:
            free_index = free_index[free_index > 0]
        if free_index.numel() == 0:
            return
        if self.free_group is None:
            if self.pool.packed is not None:
                self.pool.packed.forget(free_index)
            self.unsorted = self.changed = True
        super().free(free_index)

    def compact(self, stay: torch.Tensor, free: torch.Tensor, tokens: int) -> torch.Tensor:
        """Give back what is `free` now of a span of so many tokens. Returns the span as the tree
        keeps it, 0 where a slot went."""
        kept = stay.new_zeros(tokens)
        kept[: stay.numel()] = stay
        self.free(free)
        return kept

    def whole_bundles(self) -> int:
        """Free slots of whole bundles (pool/packed.py). It asks the device."""
        self._sort_free_list()
        return int(self._whole)

    def alloc_bundles(self, need_size: int) -> torch.Tensor | None:
        """Slots of whole bundles; None where there are not enough. need_size: a multiple of
        PAGE."""
        return self.alloc(need_size) if need_size <= self.whole_bundles() else None

    def reclaim(self, slots: torch.Tensor) -> None:
        """Free those of these slots that are not free: after something went wrong halfway."""
        free = torch.cat((self.free_pages, self.release_pages))
        self.free(slots[~torch.isin(slots, free)])

    def max_new_tokens_for_memory(
        self, input_tokens: int, max_new_tokens: int, *, token_capacity: int, **limits: Any
    ) -> int | None:
        """Return SGLang's number; for a prompt that does not fit beside as much of its answer as is
        admitted with it, count what it holds while it is compressed as it comes."""
        held = input_tokens
        if input_tokens + min(max_new_tokens, CLIP_MAX_NEW_TOKENS) >= token_capacity:
            held = self.prompt_slots(input_tokens)
        fitting: int | None = super().max_new_tokens_for_memory(
            held, max_new_tokens, token_capacity=token_capacity, **limits
        )
        return fitting

    def create_prefill_budget(
        self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0
    ) -> RestingPrefillBudget:
        return RestingPrefillBudget(
            self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens
        )

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> bool | None:
        """Evict as SGLang does, but again where what was evicted held fewer slots than tokens."""
        if tree_cache is None or not tree_cache.supports_prefix_sharing():
            return None
        while (shortfall := num_tokens - self.available_size()) > 0:
            if tree_cache.evict(EvictParams(num_tokens=shortfall)).num_tokens_evicted == 0:
                return False
        return True

    # -- what is in use, and the proof that nothing leaked --

    def used_bytes(self) -> int:
        """Device bytes of the slots in use, cached prefixes included."""
        return int((self.size - self.available_size()) * self.pool.slot_bytes)

    def check_integrity(self) -> list[str]:
        """Return what is wrong with the slots; empty when healthy."""
        problems = []
        listed = torch.cat((self.free_pages, self.release_pages))
        free = torch.bincount(listed, minlength=self.size + 1)
        if bool(free[0]):
            problems.append("the padding slot was freed")
        if bool((free > 1).any()):
            problems.append("a slot is free twice")
        if self.pool.packed is not None:
            problems += self.pool.packed.problems(free)
        return problems

    def verify_byte_accounting(self) -> list[str]:
        """SGLang's idle self-check: tree and slots, once after every change.

        The scheduler asks in a busy loop while idle; only the first time has news.
        """
        if not self.changed:
            return []
        self.changed = False
        return self.owner_check()


class RestingPrefillBudget(PrefillBudget):
    """SGLang's admission to one prefill pass, which spares what rests.

    Requests in flight hold exact KV, what rests a share of it: so requests wait while others run
    rather than push out several sessions each. See IN_FLIGHT_SHARE.
    """

    def __init__(
        self, allocator: BundleAllocator, tree_cache: Any, *, num_mixed_decode_tokens: int = 0
    ) -> None:
        super().__init__(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        share = 1.0 if allocator.pool.packed is None else IN_FLIGHT_SHARE
        self.in_flight_slots = int(share * allocator.size)

    def check_prefill(self, *, total_tokens: int, **asked: Any) -> tuple[bool, int | None]:
        in_flight = self.allocator.size - self.remaining_total + total_tokens
        if self.total_offset > 0 and in_flight > self.in_flight_slots:
            return False, None
        found: tuple[bool, int | None] = super().check_prefill(total_tokens=total_tokens, **asked)
        return found

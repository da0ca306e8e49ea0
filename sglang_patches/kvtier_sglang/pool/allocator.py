"""Slot accounting for the head-split pool.

A token at birth owns one slot of each class. SGLang hands out and frees CA slots; the
locality slot travels along in `locality_of`:

    CA slot      17   18   19   20  ...        locality_of[17] = 5     an ordinary token
    locality      5    9    0    0             locality_of[18] = 9     log_votes[9] = ln 3
                                               locality_of[19] = 0     dropped: no locality slot

The compensation entry of a dropped span takes the locality slot of the span's first token, so
it is found, shared and freed exactly like a token's. Slot 0 of either class is padding.

Handing out slots asks the device for nothing, or every decoding step would wait for the one in
flight: a number is written by `index_fill_`, as `x[slots] = 0` copies it from the host and waits.

Invariant (`check_integrity`): every locality slot but 0 is either free or the image of exactly
one CA slot that is in use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from kvtier.retention.shares import PAGE
from kvtier_sglang.pool.kv_pool import HeadSplitKVPool
from kvtier_sglang.pool.prefill_budget import HeadSplitPrefillBudget


class HeadSplitAllocator(TokenToKVPoolAllocator):
    """Free lists of both classes. Not thread-safe: the scheduler thread owns it.

    streaming_tokens: locality slots a running prefill holds at most per request when locality
    heads stream (sink + recent), or None when prefill is exact and holds all of them.
    """

    free_pages: torch.Tensor
    release_pages: torch.Tensor

    def __init__(
        self,
        pool: HeadSplitKVPool,
        *,
        streaming_tokens: int | None,
        need_sort: bool,
    ) -> None:
        self.locality_size = pool.locality_size
        self.streaming_tokens = streaming_tokens
        self.changed = True
        # The tree replaces this by its own check, which includes ours.
        self.owner_check: Callable[[], list[str]] = self.check_integrity
        super().__init__(pool.size, pool.dtype, pool.device, pool, need_sort)

    @property
    def pool(self) -> HeadSplitKVPool:
        return self._kvcache

    @property
    def locality_of(self) -> torch.Tensor:
        """[size + 1] int64: see the module docstring; the attention backend reads it too."""
        return self.pool.locality_of

    def clear(self) -> None:
        super().clear()
        self.locality_free = torch.arange(
            1, self.locality_size + 1, dtype=torch.int64, device=self.device
        )
        self.pool.locality_of.zero_()
        self.pool.settled.zero_()
        self.pool.log_votes.zero_()
        self.pool.ca_voted.zero_()
        if self.pool.packed is not None:
            self.pool.packed.clear()
        self.unsorted = False
        self.changed = True

    def locality_available_size(self) -> int:
        return int(self.locality_free.numel())

    @rank_consensus(
        same_params=["need_size"], same_results=["result if result is None else result.tolist()"]
    )
    def alloc(self, need_size: int) -> torch.Tensor | None:
        """CA slots for new tokens, each with a locality slot; None when either class is short."""
        if need_size > self.locality_free.numel():
            return None
        if self.unsorted and need_size > 1:
            self._sort_free_lists()
        self.changed = True
        slots = self._take(need_size)
        if slots is not None:
            self.locality_of[slots] = self.locality_free[:need_size]
            self.pool.settled.index_fill_(0, slots, value=False)
            self.pool.forget_scores(slots)
            self.locality_free = self.locality_free[need_size:]
        return slots

    def _take(self, need_size: int) -> torch.Tensor | None:
        """Whole bundles are for prompts: what is generated takes single slots where there are."""
        if self.pool.packed is None or not 0 < need_size < min(PAGE, len(self.free_pages)):
            return super().alloc(need_size)
        slots = self.free_pages[-need_size:]
        self.free_pages = self.free_pages[:-need_size]
        return slots

    def _sort_free_lists(self) -> None:
        """Sorted free lists give long contexts long contiguous runs, which attention reads
        in place instead of gathering. Slots of whole bundles come first."""
        self.free_pages = torch.sort(self.free_pages).values
        if self.pool.packed is not None:
            bundle = self.free_pages // PAGE
            counts = torch.zeros(self.size // PAGE + 1, dtype=torch.int64, device=self.device)
            loose = counts.index_add_(0, bundle, torch.ones_like(bundle))[bundle] < PAGE
            self.free_pages = self.free_pages[torch.argsort(loose.int(), stable=True)]
            self._whole = PAGE * (counts == PAGE).sum()
        self.locality_free = torch.sort(self.locality_free).values
        self.unsorted = False

    def free(self, free_index: torch.Tensor) -> None:
        """free_index: CA slots, of any integer type: SGLang frees what an aborted or retracted
        request has straight from its row of int32."""
        free_index = free_index.to(torch.int64)
        if self.pool.state is not None or self.pool.packed is not None:
            # Compression leaves the padding slot where a token has no CA entry any more.
            free_index = free_index[free_index > 0]
        if free_index.numel() == 0:
            return
        if self.free_group is None:
            self.free_locality(free_index)
            if self.pool.packed is not None:
                self.pool.packed.forget(free_index)
            self.unsorted = True
        super().free(free_index)

    def free_locality(self, ca_slots: torch.Tensor) -> int:
        """Give back the locality slots of these CA slots, which stay in use. Returns how many."""
        held = self.locality_of[ca_slots]
        held = held[held > 0]
        self.locality_of.index_fill_(0, ca_slots, 0)
        self.pool.log_votes.index_fill_(0, held, 0.0)
        self.locality_free = torch.cat((self.locality_free, held))
        self.unsorted = self.changed = True
        return int(held.numel())

    def drop(self, ca_slots: torch.Tensor, *, compensation: bool) -> int:
        """Drop the locality KV of a span, folding it into one compensation entry if asked.

        ca_slots: [tokens] int64 in order of position. The entry takes the locality slot of the
        first token that still has one; dropping a span again, or a longer one, folds the old
        entry in with its votes. Returns the number of locality slots given back.
        """
        if not compensation:
            return self.free_locality(ca_slots)
        holders = ca_slots[self.locality_of[ca_slots] > 0]
        if holders.numel() <= 1:
            return 0
        held = self.locality_of[holders]
        self.pool.compensate(held, int(held[0]))
        return self.free_locality(holders[1:])

    def compact(self, stay: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
        """Give back the slots of a dropped span that are not to `stay`.

        stay, free: int64; only one of all may still have a locality slot (that of the compensation
        entry), which the first to stay takes over. Returns the span as the tree keeps it, 0 where a
        slot went.
        """
        assert stay.numel(), "a span of which nothing stays"
        holder = free[self.locality_of[free] > 0]
        if holder.numel():
            assert holder.numel() == 1, "compacting what is still local"
            self.locality_of[stay[:1]] = self.locality_of[holder]
            self.locality_of.index_fill_(0, holder, 0)
        kept = torch.cat((stay, torch.zeros_like(free)))
        self.free(free)
        return kept

    def alloc_bundles(self, need_size: int) -> torch.Tensor | None:
        """Slots of whole bundles (pool/packed.py); None where there are not enough. need_size: a
        multiple of PAGE."""
        self._sort_free_lists()
        return self.alloc(need_size) if need_size <= int(self._whole) else None

    def reclaim(self, ca_slots: torch.Tensor) -> None:
        """Free those of these slots that are not free: after something went wrong halfway."""
        free = torch.cat((self.free_pages, self.release_pages))
        self.free(ca_slots[~torch.isin(ca_slots, free)])

    def settle(self, ca_slots: torch.Tensor) -> None:
        """Mark CA slots as belonging to a turn that has ended."""
        self.pool.settled.index_fill_(0, ca_slots, value=True)

    # -- the scheduler's capacity hooks, counting both classes --

    def create_prefill_budget(
        self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0
    ) -> HeadSplitPrefillBudget:
        return HeadSplitPrefillBudget(
            self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens
        )

    def max_new_tokens_for_memory(
        self,
        input_tokens: int,
        max_new_tokens: int,
        *,
        token_capacity: int,
        sliding_window_size: int | None,
        chunk_size: int | None,
    ) -> int | None:
        """As SGLang's, but a prompt that can never fit the locality pool is refused (None)."""
        room = super().max_new_tokens_for_memory(
            input_tokens,
            max_new_tokens,
            token_capacity=token_capacity,
            sliding_window_size=sliding_window_size,
            chunk_size=chunk_size,
        )
        resident = input_tokens
        if self.streaming_tokens is not None:
            resident = min(input_tokens, self.streaming_tokens + (chunk_size or input_tokens))
        left = self.locality_size - resident - 2
        if left < 1:
            return None
        return None if room is None else min(room, left)

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> bool | None:
        if tree_cache is None or not tree_cache.supports_prefix_sharing():
            return None
        while not self._has_room(num_tokens):
            shortfall = max(
                num_tokens - self.available_size(), num_tokens - self.locality_available_size()
            )
            result = tree_cache.evict(EvictParams(num_tokens=shortfall))
            if result.num_tokens_evicted == 0:
                return False
        return True

    def check_decode_capacity(
        self, *, num_tokens: int, tree_cache: Any, requests: Any = None, spec_algorithm: Any = None
    ) -> bool:
        self.evict_to_free_tokens(tree_cache, num_tokens)
        return self._has_room(num_tokens)

    def _has_room(self, num_tokens: int) -> bool:
        return min(self.available_size(), self.locality_available_size()) >= num_tokens

    # -- what is in use, and the proof that nothing leaked --

    def used_bytes(self) -> int:
        """Device bytes of the slots in use, cached prefixes included."""
        per_slot = self.pool.slot_bytes
        ca = self.size - self.available_size()
        locality = self.locality_size - self.locality_available_size()
        return ca * per_slot.ca + locality * per_slot.locality

    def check_integrity(self) -> list[str]:
        """Violations of the invariant in this module's docstring; empty when healthy."""
        problems = []
        free_ca = torch.cat((self.free_pages, self.release_pages))
        if bool((free_ca == 0).any()):
            problems.append("the padding slot was freed")
        if torch.unique(free_ca).numel() != free_ca.numel():
            problems.append("a CA slot is free twice")
        if bool(self.locality_of[free_ca].any()):
            problems.append("a free CA slot still owns a locality slot")
        owned = self.locality_of[self.locality_of > 0]
        both = torch.cat((owned, self.locality_free))
        counts = torch.bincount(both, minlength=self.locality_size + 1)[1:]
        if bool((counts > 1).any()):
            problems.append("a locality slot has two owners, or is owned and free")
        missing = int((counts == 0).sum())
        if missing:
            problems.append(f"{missing} locality slots are neither owned nor free")
        votes = torch.nonzero(self.pool.log_votes).flatten()
        if not bool(torch.isin(votes, owned).all()):
            problems.append("a slot without an owner has votes")
        if self.pool.packed is not None:
            problems += self.pool.packed.problems(free_ca)
        return problems

    def verify_byte_accounting(self) -> list[str]:
        """SGLang's idle self-check: tree and slots, once after every change.

        The scheduler asks in a busy loop while idle; only the first time has news.
        """
        if not self.changed:
            return []
        self.changed = False
        return self.owner_check()

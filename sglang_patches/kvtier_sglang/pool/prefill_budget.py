"""Prefill admission that counts both pools, and spares what rests.

SGLang's budget keeps counting CA slots (one per token). Locality slots are counted beside
them: every new token needs one, except that a streaming prefill holds only sink + recent +
the chunk in flight.

Requests in flight hold exact KV, what rests a share of it. Where both are in one pool, requests
wait while others run rather than push out several sessions each: see IN_FLIGHT_SHARE.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from kvtier.pool_sizing import IN_FLIGHT_SHARE


class HeadSplitPrefillBudget(PrefillBudget):
    """One prefill pass. Offsets are tokens promised to requests already admitted."""

    def __init__(
        self, allocator: Any, tree_cache: Any, *, num_mixed_decode_tokens: int = 0
    ) -> None:
        super().__init__(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        self.locality_offset = num_mixed_decode_tokens
        packs = allocator.pool.packed is not None
        self.in_flight_slots = int(IN_FLIGHT_SHARE * allocator.size) if packs else allocator.size

    @property
    def remaining_locality(self) -> int:
        """Locality slots that are free or can be freed, less those promised."""
        return int(
            self.allocator.locality_available_size()
            + self.tree_cache.locality_evictable_size()
            - self.locality_offset
            # total_offset also carries the decode headroom of running requests.
            - max(0, self.total_offset - self.current_offset)
        )

    def locality_tokens(self, extend_tokens: int, chunk_limit: int | None) -> int:
        """Locality slots a prefill of `extend_tokens` holds at its peak."""
        streaming = self.allocator.streaming_tokens
        if streaming is None or chunk_limit is None:
            return extend_tokens
        return min(extend_tokens, chunk_limit + streaming)

    def has_capacity(self) -> bool:
        return super().has_capacity() and self.remaining_locality > 0

    def check_prefill(
        self,
        *,
        extend_input_len: int,
        total_tokens: int,
        max_new_tokens: int,
        input_tokens: int,
        swa_host_hit_length: int,
        chunk_limit: int | None,
        auxiliary_swa_host_hit_length: int = 0,
    ) -> tuple[bool, int | None]:
        if total_tokens >= self.remaining_total:
            return False, None
        in_flight = self.allocator.size - self.remaining_total + total_tokens
        if self.total_offset > 0 and in_flight > self.in_flight_slots:
            return False, None
        beyond_extend = total_tokens - extend_input_len
        needed = self.locality_tokens(extend_input_len, chunk_limit) + beyond_extend
        if needed < self.remaining_locality:
            return True, chunk_limit
        return self._alone(extend_input_len, chunk_limit)

    def _alone(self, extend_tokens: int, chunk_limit: int | None) -> tuple[bool, int | None]:
        """Admission of a request when no other runs that could make room for it.

        Its decode headroom is then no reason to wait (running out of it ends in SGLang's own
        retraction), and a streaming prefill may take smaller chunks.
        """
        if self.total_offset > 0:
            return False, None
        if extend_tokens < self.remaining_locality:
            return True, chunk_limit
        streaming = self.allocator.streaming_tokens
        if streaming is None or chunk_limit is None:
            return False, None
        room = self.remaining_locality - streaming - 1
        return (True, min(chunk_limit, room)) if room > 0 else (False, None)

    def can_allocate_prefill(
        self,
        *,
        paged_input: int,
        extend_input_len: int,
        max_new_tokens: int,
        chunk_limit: int | None,
    ) -> bool:
        fits = super().can_allocate_prefill(
            paged_input=paged_input,
            extend_input_len=extend_input_len,
            max_new_tokens=max_new_tokens,
            chunk_limit=chunk_limit,
        )
        needed = self.locality_tokens(paged_input, chunk_limit)
        return bool(fits) and needed <= self.remaining_locality

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        """Tokens the next chunk of a running prefill may take; None: wait for a decode to end.

        Waiting cannot last: what the prompt needs at its peak was admitted against both pools,
        so once nothing else runs its next chunk fits.
        """
        room = min(chunk_limit, int(self.remaining_total), self.remaining_locality)
        return room if room > 0 else None

    def reserve(
        self,
        extend_input_len: int,
        max_new_tokens: int,
        *,
        extra_tokens: int = 0,
        chunk_limit: int | None = None,
        is_chunked_continuation: bool = False,
    ) -> None:
        super().reserve(extend_input_len, max_new_tokens, extra_tokens=extra_tokens)
        self.locality_offset += self.locality_tokens(extend_input_len, chunk_limit) + extra_tokens

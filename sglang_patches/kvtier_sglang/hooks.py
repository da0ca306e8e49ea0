"""The functions hooked into SGLang that make no part of kvtier: they refuse, tell apart and report.
Each does nothing unless kvtier's backends were asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtier_sglang import compat
from kvtier_sglang.exact_requests import recomputed_tokens, wants_exact
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool
from kvtier_sglang.radix.cache import KvtierRadixCache


def check_flags(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE ServerArgs.resolve_once: refuse what cannot be combined, before anything loads, and
    change what would not work.

    SGLang asks again and again for a resolution that is done, in children too; then the arguments
    are read-only, and what they are was checked here before.
    """
    if compat.uses_kvtier(server_args) and not compat.is_resolved(server_args):
        settings = compat.settings_of(server_args)
        compat.check_server_args(server_args, settings)
        compat.settle_page_size(server_args)
        compat.settle_cuda_graphs(server_args, settings)


def refuse_fused_write(original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    """AROUND enable_fused_set_kv_buffer: models that store KV themselves know SGLang's pools alone;
    over kvtier's pool the attention backend does it."""
    from sglang.srt.models import utils

    return not isinstance(utils.get_token_to_kv_pool(), HeadPagedKVPool) and original(
        *args, **kwargs
    )


def ask_tier(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE Scheduler._prefetch_kvcache: SGLang's scheduler prefetches, waits and loads back for
    storage tiers that it knows by name; what it does for LMCache is what ours needs. A tier that is
    away is not asked, so then it need not look beforehand what it would ask for."""
    cache = scheduler.tree_cache
    if isinstance(cache, KvtierRadixCache) and cache.tier is not None:
        scheduler.enable_lmcache = cache.uses_tier


def admit_streaming(
    original: Callable[..., tuple[bool, int | None]],
    adder: Any,
    req: Any,
    *,
    extend_input_len: int,
    total_tokens: int,
    chunk_limit: int | None,
    **rest: Any,
) -> tuple[bool, int | None]:
    """AROUND PrefillAdder._check_prefill_budget: a prompt that is compressed while it is prefilled
    needs room for less than all of it."""
    cache = adder.tree_cache

    def fits(wanted: int) -> tuple[bool, int | None]:
        asked = {"extend_input_len": extend_input_len, "chunk_limit": chunk_limit, **rest}
        return original(adder, req, total_tokens=wanted, **asked)

    found = fits(total_tokens)
    if found[0] or not isinstance(cache, KvtierRadixCache):
        return found
    fewer = cache.streaming.admitted_with(req, extend_input_len, total_tokens, chunk_limit)
    return fits(fewer) if fewer < total_tokens else found


def raise_limits(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE Scheduler.get_init_info: prompts may be longer than the pool."""
    cache = scheduler.tree_cache
    if isinstance(cache, KvtierRadixCache) and cache.streaming.is_on:
        longest = min(scheduler.model_config.context_len, cache.streaming.most_tokens) - 1
        further = max(0, longest - scheduler.max_req_len)
        scheduler.max_req_len += further
        scheduler.max_req_input_len += further


def fit_exact(result: None, scheduler: Any, req: Any) -> None:
    """AFTER Scheduler.init_req_max_new_tokens: a prompt that is longer than the pool cannot be
    answered as if nothing were dropped, and of another the answer has to fit beside all of it."""
    if not isinstance(scheduler.tree_cache, KvtierRadixCache) or not wants_exact(req):
        return
    tokens, size = len(req.origin_input_ids), scheduler.token_to_kv_pool_allocator.size
    if tokens >= size:
        req.set_finish_with_abort(
            f"an exact answer, or log-probabilities of the prompt: expected a prompt of fewer than "
            f"{size} tokens, which is what the KV pool holds, got {tokens}"
        )
        return
    asked = req.sampling_params
    # As SGLang counts: a page beside, and the last token has no KV.
    asked.max_new_tokens = max(0, min(asked.max_new_tokens, size - tokens - 2))
    asked.min_new_tokens = min(asked.min_new_tokens, asked.max_new_tokens)


def make_room_for_drafts(original: Callable[[], int]) -> int:
    """AROUND get_req_to_token_extra_context_len: a request's row must hold what SGLang reserves
    ahead of its drafts. Near the context's end that is more than SGLang counts, which then writes
    into the next request's row."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.runtime_context import get_spec

    extra = original()
    if get_spec().speculative_algorithm is None or not any(compat.backends_are_ours()):
        return extra
    return max(extra, get_alloc_reserve_per_decode() + 1)


def weights_change(manager: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE every call of SGLang's that can change weights: KV of the weights before must not be
    taken for KV of those after."""
    cache = getattr(manager.scheduler, "tree_cache", None)
    if isinstance(cache, KvtierRadixCache):
        cache.weights_change()


def report_recomputed(
    result: dict[str, int | str] | None, streamer: Any, req: Any
) -> dict[str, int | str] | None:
    """AFTER get_cached_tokens_details: the response's `cached_tokens_details` says how many cached
    tokens were computed again for an exact answer, where there were any."""
    tokens = recomputed_tokens(req)
    if not tokens:
        return result
    return {"device": 0, "host": 0, **(result or {}), "kvtier_recomputed": tokens}

"""The functions hooked into SGLang that make no part of kvtier: they refuse, tell apart and report.
Each does nothing unless kvtier's backends were asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtier_sglang import compat
from kvtier_sglang.exact_requests import recomputed_tokens
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

"""The functions hooked into SGLang that make no part of kvtier: they refuse, tell apart and report.
Each does nothing unless kvtier's backends were asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups import model_hook
from sglang.srt.managers.schedule_policy import AddReqResult

from kvtier.errors import UsageError
from kvtier_sglang import compat
from kvtier_sglang.pool.allocator import BundleAllocator
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool
from kvtier_sglang.radix.cache import KvtierRadixCache
from kvtier_sglang.request_options import wants_exact


def check_flags(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE ServerArgs.resolve_once: refuse what cannot be combined, before anything loads, and
    change what would not work.

    SGLang asks again and again for a resolution that is done, in children too; then the arguments
    are read-only, and what they are was checked here before.
    """
    if compat.uses_kvtier(server_args) and not compat.is_resolved(server_args):
        compat.say_if_not_tested()
        settings = compat.settings_of(server_args)
        compat.check_server_args(server_args, settings)
        compat.settle_tokens(server_args)
        compat.settle_cuda_graphs(server_args, settings)


def name_known_backend(original: Callable[..., None], server_args: Any) -> None:
    """AROUND handle_model_specific_adjustments: of some models SGLang knows which backends compute
    them. kvtier's computes what `triton` does there, or the model was refused before."""
    known = model_hook.attention_backends_of

    def named(config: Any) -> tuple[str | None, ...]:
        return tuple("triton" if name == compat.NAME else name for name in known(config))

    model_hook.attention_backends_of = named
    try:
        original(server_args)
    finally:
        model_hook.attention_backends_of = known


def go_without_nccl(
    *args: Any, use_pynccl: bool | None = None, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """BEFORE init_model_parallel_group on a CPU: before 0.5.23 SGLang does not ask the platform
    whether it has NCCL, and ends where the library is there and no GPU."""
    return args, {**kwargs, "use_pynccl": bool(use_pynccl)}


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
        scheduler.enable_lmcache = scheduler.enable_hicache_storage = cache.uses_tier


def ask_tier_again(original: Callable[..., bool], scheduler: Any, req: Any) -> bool:
    """AROUND Scheduler._prefetch_after_device_hit_loss: a request that is to be admitted may have
    lost its prefix while it was queued. Return whether it waits for the tier now.

    SGLang's own gives up after some attempts, and logs each; ours ask for what is lost since they
    asked last, which is always more.
    """
    cache = scheduler.tree_cache
    if not isinstance(cache, KvtierRadixCache) or cache.tier is None:
        return original(scheduler, req)
    if req.prefix_len + req.host_hit_length >= (req.storage_prefetch_last_match_len or 0):
        return False
    scheduler._prefetch_kvcache(req)
    return cache.waits(req.rid)


def admit_streaming(
    original: Callable[..., tuple[bool, int | None]],
    adder: Any,
    req: Any,
    *,
    extend_input_len: int,
    total_tokens: int,
    **rest: Any,
) -> tuple[bool, int | None]:
    """AROUND PrefillAdder._check_prefill_budget: a prompt that is compressed while it is prefilled
    needs room for less than all of it."""
    cache = adder.tree_cache
    # Before 0.5.23 it is the adder's own.
    chunk_limit = rest.get("chunk_limit", adder.rem_chunk_tokens)

    def fits(wanted: int) -> tuple[bool, int | None]:
        asked = {"extend_input_len": extend_input_len, **rest}
        return original(adder, req, total_tokens=wanted, **asked)

    found = fits(total_tokens)
    if found[0] or not isinstance(cache, KvtierRadixCache):
        return found
    fewer = cache.streaming.admitted_with(req, extend_input_len, total_tokens, chunk_limit)
    return fits(fewer) if fewer < total_tokens else found


def cap_prefill_at_reuse(
    original: Callable[..., Any],
    adder: Any,
    req: Any,
    *,
    host_hit_length: int,
    has_chunked_req: bool = False,
    **rest: Any,
) -> Any:
    """AROUND PrefillAdder._select_prefill_admission: a prefill stops where tokens begin that stood
    behind an edit. What is cut is in chunks, of which SGLang has one request at a time."""
    limit = adder.rem_chunk_tokens
    tokens = _tokens_ahead(adder, req, req.prefix_len + host_hit_length)
    if tokens is not None and limit is not None:
        adder.rem_chunk_tokens = min(limit, tokens)
    try:
        found = original(
            adder, req, host_hit_length=host_hit_length, has_chunked_req=has_chunked_req, **rest
        )
    finally:
        adder.rem_chunk_tokens = limit
    # The one before may have stopped with tokens of the pass left.
    is_second = has_chunked_req or adder.new_chunked_req is not None
    return AddReqResult.OTHER if is_second and getattr(found, "is_chunked", False) else found


def cap_chunk_at_reuse(adder: Any, req: Any) -> None:
    """BEFORE PrefillAdder.add_chunked_req: the same of a prefill that goes on."""
    tokens = _tokens_ahead(adder, req, req.prefix_len)
    if tokens is not None:
        before = adder.chunked_req_limit
        adder.chunked_req_limit = tokens if before is None else min(before, tokens)


def _tokens_ahead(adder: Any, req: Any, position: int) -> int | None:
    cache = adder.tree_cache
    state = cache.requests.get(req.rid) if isinstance(cache, KvtierRadixCache) else None
    return None if state is None else state.tokens_ahead(position)


def raise_limits(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE Scheduler.get_init_info: prompts may be longer than the pool."""
    cache = scheduler.tree_cache
    if isinstance(cache, KvtierRadixCache) and cache.streaming.is_on:
        longest = min(scheduler.model_config.context_len, cache.streaming.most_tokens) - 1
        further = max(0, longest - scheduler.max_req_len)
        scheduler.max_req_len += further
        scheduler.max_req_input_len += further


def fit_exact(scheduler: Any, req: Any) -> None:
    """Abort a new request for exact KV whose prompt is longer than the pool, where it cannot be
    answered as if nothing were dropped; have the answer of another fit beside all of its prompt."""
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
    # SGLang counts like this: a page beside, and the last token has no KV.
    asked.max_new_tokens = max(0, min(asked.max_new_tokens, size - tokens - 2))
    asked.min_new_tokens = min(asked.min_new_tokens, asked.max_new_tokens)


def refuse_beams(
    original: Callable[..., str | None], coordinator: Any, req: Any, recv_req: Any
) -> str | None:
    """AROUND BeamCoordinator.validate_and_init, which returns what is wrong with a request that
    asks for beams: SGLang gives the beams rows of its own table alone, and where tokens may have no
    slot attention reads kvtier's."""
    allocator = coordinator.token_to_kv_pool_allocator
    if isinstance(allocator, BundleAllocator) and allocator.has_gaps:
        expected = "1 beside a share, a head profile or a memory"
        return str(UsageError("beam_width", expected, req.sampling_params.beam_width))
    return original(coordinator, req, recv_req)


def make_room_for_drafts(original: Callable[[], int]) -> int:
    """AROUND get_req_to_token_extra_context_len: a request's row must hold what SGLang reserves
    ahead of its drafts. Near the context's end that is more than SGLang counts, which then writes
    into the next request's row."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.runtime_context import get_spec

    extra = original()
    is_ours = compat.attention_is_ours() or compat.cache_is_ours()
    if get_spec().speculative_algorithm is None or not is_ours:
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
    tokens were computed again for an exact answer, and how many were computed behind other text,
    where there were any."""
    found = {name: getattr(req, name, 0) for name in ("kvtier_recomputed", "kvtier_moved")}
    told = {name: tokens for name, tokens in found.items() if tokens}
    return {"device": 0, "host": 0, **(result or {}), **told} if told else result

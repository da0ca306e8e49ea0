"""The functions hooked into SGLang where it has no seam. Each does nothing unless kvtier's
backends were asked for, except the two that only observe.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from kvtier.config import Settings, load_settings
from kvtier.heads.profile import HeadProfile, ModelShape, full_profile, load_profile
from kvtier.pool_sizing import SessionShape, locality_slots_for, plan_pools, slot_bytes, with_tables
from kvtier_sglang import guards
from kvtier_sglang.allocator import HeadSplitAllocator
from kvtier_sglang.calibrated import stored_profile
from kvtier_sglang.graphs import room_bytes
from kvtier_sglang.guards import NAME
from kvtier_sglang.pool import HeadSplitKVPool
from kvtier_sglang.scopes import separate_adapters
from kvtier_sglang.tiered import TieredRadixCache
from kvtier_sglang.variants import recomputed_tokens

logger = logging.getLogger(__name__)


def _ours() -> tuple[bool, bool]:
    """Whether (attention, radix cache) of this server are kvtier's."""
    from sglang.srt.runtime_context import get_exec, get_memory

    return (
        get_exec().kernel.attention_backend == NAME,
        get_memory().radix_cache_backend == NAME,
    )


def check_flags(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE ServerArgs.resolve_once: refuse what cannot be combined, before anything loads, and
    turn off what would not work.

    SGLang asks again and again for a resolution that is done, in children too; then the arguments
    are read-only, and what they are was checked here before.
    """
    if guards.uses_kvtier(server_args) and not guards.is_resolved(server_args):
        settings = load_settings()
        guards.check_server_args(server_args, settings)
        guards.settle_cuda_graphs(server_args, settings)


def _profile(configurator: Any, settings: Settings) -> HeadProfile:
    """The profile in force: the user's or the stored one for kvtier's tree, every head CA for
    SGLang's own."""
    config = configurator.model_config
    shape = ModelShape(
        num_layers=configurator.layer_info.num_effective_layers,
        num_kv_heads=config.get_total_num_kv_heads(),
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
    )
    _, radix = _ours()
    if not radix:
        return full_profile(shape)
    if settings.head_profile is None:
        return stored_profile(settings, config.model_path, shape) or full_profile(shape)
    profile = load_profile(settings.head_profile)
    profile.check_fits(shape)
    return profile


def _session_shape(settings: Settings, longest: int) -> SessionShape:
    """What sessions are expected to look like; `longest` tokens is what model or pool allow."""
    from sglang.srt.runtime_context import get_schedule

    context = min(settings.session_tokens, longest)
    kept = settings.sink_tokens + settings.recent_tokens + 1
    prefill = context
    chunk = get_schedule().chunked_prefill_size
    if settings.prefill == "streaming" and chunk and chunk > 0:
        prefill = min(prefill, chunk + settings.sink_tokens + settings.recent_tokens)
    return SessionShape(
        context_tokens=context,
        turn_tokens=settings.turn_tokens,
        kept_tokens=kept,
        prefill_tokens=prefill,
        retention=settings.expected_retention,
    )


def size_pools(
    original: Callable[..., Any], configurator: Any, budget_bytes: int, **kwargs: Any
) -> Any:
    """AROUND config_from_budget: turn the byte budget into slots of both classes.

    SGLang divides the budget by the bytes of a whole token. Handing it the bytes that as many
    whole tokens as we have CA slots would cost makes it arrive at our number; a token cap of
    the user (--max-total-tokens) caps the CA slots as it always did.
    """
    attention, radix = _ours()
    if not radix:
        room = _graph_bytes(configurator, 1) if attention else 0
        return original(configurator, budget_bytes - room, **kwargs)
    settings = load_settings()
    profile = _profile(configurator, settings)
    every = profile.shape.num_layers * profile.shape.num_kv_heads
    budget_bytes -= _graph_bytes(configurator, 1 if profile.num_ca_heads == every else 2)
    itemsize = configurator.kv_cache_dtype.itemsize
    merges = settings.merge != "off"
    per_slot = slot_bytes(profile, itemsize, scored=settings.compacts, merges=merges)
    longest = configurator.model_config.context_len
    shape = _session_shape(settings, longest)
    plan = plan_pools(budget_bytes, with_tables(per_slot), shape)
    config = original(configurator, plan.ca_slots * per_slot.full, **kwargs)
    ca_slots = config.max_total_num_tokens
    derived = plan.locality_slots
    if ca_slots < plan.ca_slots:
        derived = locality_slots_for(ca_slots, _session_shape(settings, min(longest, ca_slots)))
    configurator_slots[id(configurator)] = settings.locality_slots or derived
    return config


def _graph_bytes(configurator: Any, classes: int) -> int:
    """What recording decoding will take on top of what SGLang sets aside for graphs."""
    from sglang.srt.runtime_context import get_exec

    if not str(configurator.device).startswith("cuda"):
        return 0
    decode = get_exec().graph.cuda_graph_config.decode
    if decode.backend == "disabled":
        return 0
    requests = max(decode.bs or [decode.max_bs or 0])
    return room_bytes(requests, configurator.model_config.context_len, classes)


# The configurator has __slots__, so what sizing decided waits here for the pool to be built.
configurator_slots: dict[int, int] = {}


def build_pool(
    original: Callable[..., Any], configurator: Any, *, max_total_num_tokens: int, **kwargs: Any
) -> Any:
    """AROUND _build_mha_kv_pool: the head-split pool where attention is kvtier's."""
    attention, radix = _ours()
    if not attention:
        return original(configurator, max_total_num_tokens=max_total_num_tokens, **kwargs)
    settings = load_settings()
    profile = _profile(configurator, settings)
    locality_slots = 0
    if radix:
        locality_slots = configurator_slots.pop(id(configurator))
    pool = HeadSplitKVPool(
        max_total_num_tokens,
        locality_slots,
        profile=profile,
        dtype=configurator.kv_cache_dtype,
        device=configurator.device,
        start_layer=configurator.layer_info.start_layer,
        scored=radix and settings.compacts,
        merges=radix and settings.merge != "off",
    )
    logger.info(
        "kvtier pools: %d CA slots, %d locality slots, %d of %d KV heads CA",
        max_total_num_tokens,
        locality_slots,
        profile.num_ca_heads,
        profile.shape.num_layers * profile.shape.num_kv_heads,
    )
    return pool


def refuse_fused_write(original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    """AROUND enable_fused_set_kv_buffer: models that store KV themselves know one class of heads;
    over a head-split pool the attention backend does it."""
    from sglang.srt.models import utils

    return not isinstance(utils.get_token_to_kv_pool(), HeadSplitKVPool) and original(
        *args, **kwargs
    )


def build_allocator(
    original: Callable[..., Any],
    configurator: Any,
    *,
    token_to_kv_pool: Any,
    token_to_kv_pool_allocator: Any,
    **kwargs: Any,
) -> Any:
    """AROUND _build_token_to_kv_pool_allocator: ours where the radix cache is kvtier's."""
    _, radix = _ours()
    if not radix or token_to_kv_pool_allocator is not None:
        return original(
            configurator,
            token_to_kv_pool=token_to_kv_pool,
            token_to_kv_pool_allocator=token_to_kv_pool_allocator,
            **kwargs,
        )
    settings = load_settings()
    streaming = None
    if settings.prefill == "streaming":
        streaming = settings.sink_tokens + settings.recent_tokens + 1
    return HeadSplitAllocator(token_to_kv_pool, streaming_tokens=streaming, need_sort=False)


def ask_tier(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE Scheduler._prefetch_kvcache: SGLang's scheduler prefetches, waits and loads back for
    storage tiers that it knows by name; what it does for LMCache is what ours needs. A tier that is
    away is not asked, so then it need not look beforehand what it would ask for."""
    tree = scheduler.tree_cache
    if isinstance(tree, TieredRadixCache):
        scheduler.enable_lmcache = tree.link.healthy or tree.has_pending_cache_operations()


def weights_change(manager: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE every call of SGLang's that can change weights: KV of the weights before must not be
    taken for KV of those after."""
    tree = getattr(manager.scheduler, "tree_cache", None)
    if isinstance(tree, TieredRadixCache):
        tree.weights_change()


def scope_request(result: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER Req.__init__: extra keys and adapters cannot be taken for each other."""
    if _ours()[1]:
        separate_adapters(req)


def report_recomputed(
    result: dict[str, int | str] | None, streamer: Any, req: Any
) -> dict[str, int | str] | None:
    """AFTER get_cached_tokens_details: the response's `cached_tokens_details` says how many cached
    tokens were computed again for exact log-probabilities, where there were any."""
    tokens = recomputed_tokens(req)
    if not tokens:
        return result
    return {"device": 0, "host": 0, **(result or {}), "kvtier_recomputed": tokens}


# -- observation, for every policy --

_peak = {"bytes": 0}


def _pool_bytes(allocator: Any) -> int:
    """Bytes of the pool's buffers; some of SGLang's pools report K and V apart, some together."""
    size = allocator.get_kvcache().get_kv_size_bytes()
    return int(sum(size)) if isinstance(size, tuple) else int(size)


def _used_bytes(allocator: Any) -> int:
    if isinstance(allocator, HeadSplitAllocator):
        return allocator.used_bytes()
    # The padding slot is part of the buffers but never of the occupancy.
    per_slot = _pool_bytes(allocator) // (allocator.size + 1)
    return int((allocator.size - allocator.available_size()) * per_slot)


def observe_peak(result: torch.Tensor, tree_cache: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER alloc_token_slots: remember the highest occupancy since it was last read.

    Runs in every SGLang process, whatever pools it has, so it must never fail one.
    """
    with contextlib.suppress(Exception):
        used = _used_bytes(tree_cache.token_to_kv_pool_allocator)
        _peak["bytes"] = max(_peak["bytes"], used)


def report_state(result: Any, controller: Any, state: dict[str, Any]) -> None:
    """AFTER _add_memory_usage: pool occupancy under internal_states[*]["kvtier"].

    Absent where the pools are of a kind that cannot be read this way.
    """
    with contextlib.suppress(Exception):
        state["kvtier"] = _report(controller.scheduler)
        _peak["bytes"] = 0


def _report(scheduler: Any) -> dict[str, Any]:
    allocator = scheduler.token_to_kv_pool_allocator
    used = _used_bytes(allocator)
    report: dict[str, Any] = {
        "kv_used_bytes": used,
        "kv_peak_bytes": max(_peak["bytes"], used),
        "kv_capacity_bytes": _pool_bytes(allocator),
        "ca_slots": allocator.size,
        "ca_slots_used": allocator.size - allocator.available_size(),
    }
    if isinstance(allocator, HeadSplitAllocator):
        tree = scheduler.tree_cache
        report |= {
            "locality_slots": allocator.locality_size,
            "locality_slots_used": allocator.locality_size - allocator.locality_available_size(),
            "integrity": tree.check_integrity(),
            **tree.counters,
            "retention": tree.retention.report(),
        }
        if isinstance(tree, TieredRadixCache):
            report["tier"] = tree.tier_report()
    return report

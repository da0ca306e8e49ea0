"""What kvtier registers and hooks in every SGLang process, and the proof that it took.

SGLang only logs a plugin that fails. So every hook is named in `HOOKS`, `verify` compares that
list with what SGLang really applied, and the objects built late (attention backend, radix
cache) refuse to start on foundations that are not ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvtier.config import Settings, load_settings
from kvtier.errors import StartupError
from kvtier_sglang import guards, hooks, requests, surprise
from kvtier_sglang.guards import NAME

logger = logging.getLogger(__name__)

_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"

_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
# What of it can change weights: updates, what restores or packs them, memory that comes back
# without them, and a check that overwrites them.
WEIGHT_CHANGES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
    "release_memory_occupation",
    "resume_memory_occupation",
    "check_weights",
)

_WEIGHT_HOOK: tuple[Callable[..., Any], HookType] = (hooks.weights_change, HookType.BEFORE)

HOOKS: dict[str, tuple[Callable[..., Any], HookType]] = {
    "sglang.srt.server_args.ServerArgs.resolve_once": (hooks.check_flags, HookType.BEFORE),
    f"{_CONFIGURATOR}.config_from_budget": (hooks.size_pools, HookType.AROUND),
    f"{_CONFIGURATOR}._build_mha_kv_pool": (hooks.build_pool, HookType.AROUND),
    f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator": (
        hooks.build_allocator,
        HookType.AROUND,
    ),
    "sglang.srt.layers.logits_processor.LogitsProcessor.forward": (
        surprise.observe_surprise,
        HookType.AROUND,
    ),
    "sglang.srt.models.utils.enable_fused_set_kv_buffer": (
        hooks.refuse_fused_write,
        HookType.AROUND,
    ),
    "sglang.srt.mem_cache.allocation.alloc_token_slots": (hooks.observe_peak, HookType.AFTER),
    "sglang.srt.managers.scheduler.Scheduler._prefetch_kvcache": (
        hooks.ask_tier,
        HookType.BEFORE,
    ),
    f"{_STREAMER}.get_cached_tokens_details": (hooks.report_recomputed, HookType.AFTER),
    f"{_STATE}._add_memory_usage": (hooks.report_state, HookType.AFTER),
    "sglang.srt.managers.schedule_batch.Req.__init__": (hooks.scope_request, HookType.AFTER),
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request": (
        requests.check_request,
        HookType.BEFORE,
    ),
    f"{_CONTROL}.release_memory_occupation": (requests.refuse_offload, HookType.BEFORE),
    f"{_CONTROL}.resume_memory_occupation": (requests.refuse_offload, HookType.BEFORE),
    **{f"{_WEIGHTS}.{name}": _WEIGHT_HOOK for name in WEIGHT_CHANGES},
}


def register() -> None:
    """Entry point `sglang.srt.plugins`: runs once in every SGLang process."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    register_attention_backend(NAME)(_attention_backend)
    add_attention_backend_choices([NAME])
    register_radix_cache_backend(NAME, _radix_cache)
    for target, (hook, kind) in HOOKS.items():
        HookRegistry.register(target, hook, kind)


def verify() -> None:
    """Raise StartupError unless every registration and hook is in force in this process."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.mem_cache.registry import get_radix_cache_factory

    missing = [target for target in HOOKS if target not in HookRegistry._patched]
    if NAME not in ATTENTION_BACKENDS:
        missing.append("attention backend registration")
    if get_radix_cache_factory(NAME) is None:
        missing.append("radix cache registration")
    if missing:
        raise StartupError(
            "kvtier is installed but did not take effect in SGLang: " + ", ".join(missing)
        )


def _attention_backend(runner: Any) -> Any:
    from kvtier_sglang.attention import KvtierAttnBackend
    from kvtier_sglang.warm_up import warm_up

    verify()
    settings = _settings()
    backend = KvtierAttnBackend(runner, settings)
    if torch.device(runner.device).type == "cuda":
        context = int(runner.model_config.context_len)
        chunk = runner.server_args.chunked_prefill_size
        streams = settings.prefill == "streaming"
        warm_up(
            backend.kernels,
            backend.pool,
            dtype=runner.dtype,
            chunk=chunk if chunk and chunk > 0 else context,
            context=context,
            window=(settings.sink_tokens, settings.recent_tokens) if streams else None,
        )
    return backend


def _radix_cache(ctx: Any) -> Any:
    from kvtier_sglang.allocator import HeadSplitAllocator
    from kvtier_sglang.build import build

    verify()
    allocator = ctx.params.token_to_kv_pool_allocator
    if not isinstance(allocator, HeadSplitAllocator):
        raise StartupError(
            f"radix cache kvtier: expected a HeadSplitAllocator, got {type(allocator).__name__}; "
            "serve with --attention-backend kvtier as well"
        )
    return build(ctx, _settings())


def _settings() -> Settings:
    return load_settings()


__all__ = ["HOOKS", "guards", "register", "verify"]

"""The registration of kvtier and its hooks in every SGLang process, and the proof that it took.

SGLang only logs a plugin that fails. So every hook is named in `hooks_of`, `verify` compares that
list with what SGLang really applied, and the objects built late (attention backend, radix
cache) refuse to start on foundations that are not ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvtier.errors import StartupError
from kvtier_sglang import cpu_drafts, hooks, requests
from kvtier_sglang.compat import NAME
from kvtier_sglang.memory.hooks import RequestHooks
from kvtier_sglang.occupancy import Occupancy
from kvtier_sglang.platform import is_cpu
from kvtier_sglang.runtime import Runtime
from kvtier_sglang.shadow import Shadow
from kvtier_sglang.status import state
from kvtier_sglang.status.publisher import publish
from kvtier_sglang.tracing.tracer import engine_tracer
from kvtier_sglang.versions import sglang_version

_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_CACHE = "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache"
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"

_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
# The operations that can change weights: updates, what restores or packs them, memory that comes
# back without them, and a check that overwrites them.
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


def hooks_of(runtime: Runtime) -> dict[str, tuple[Callable[..., Any], HookType]]:
    """Return what is hooked, and where. runtime: of this process; it makes the parts."""
    occupancy, on_requests = Occupancy(), RequestHooks(lambda: runtime.memories)
    shadow = Shadow()
    before, around, after = HookType.BEFORE, HookType.AROUND, HookType.AFTER
    on_cpu = cpu_drafts.functions() if is_cpu() else {}
    older: dict[str, tuple[Callable[..., Any], HookType]] = {}
    if is_cpu() and sglang_version() < (0, 5, 23):
        groups = "sglang.srt.distributed.parallel_state.init_model_parallel_group"
        older[groups] = (hooks.go_without_nccl, before)
    return {
        **older,
        "sglang.srt.server_args.ServerArgs.resolve_once": (hooks.check_flags, before),
        "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments": (
            hooks.name_known_backend,
            around,
        ),
        f"{_CONFIGURATOR}.config_from_budget": (runtime.size_pools, around),
        f"{_CONFIGURATOR}._build_mha_kv_pool": (runtime.build_pool, around),
        f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator": (runtime.build_allocator, around),
        "sglang.srt.layers.logits_processor.LogitsProcessor.forward": (
            runtime.measure_prompt_nll,
            around,
        ),
        "sglang.srt.mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len": (
            hooks.make_room_for_drafts,
            around,
        ),
        "sglang.srt.models.utils.enable_fused_set_kv_buffer": (hooks.refuse_fused_write, around),
        "sglang.srt.mem_cache.allocation.alloc_token_slots": (occupancy.observe_peak, after),
        f"{_CACHE}.update_eviction_metrics": (occupancy.count_evicted, after),
        "sglang.srt.managers.scheduler.Scheduler._prefetch_kvcache": (hooks.ask_tier, before),
        "sglang.srt.managers.scheduler.Scheduler._prefetch_after_device_hit_loss": (
            hooks.ask_tier_again,
            around,
        ),
        "sglang.srt.managers.schedule_policy.PrefillAdder._check_prefill_budget": (
            hooks.admit_streaming,
            around,
        ),
        "sglang.srt.managers.schedule_policy.PrefillAdder._select_prefill_admission": (
            hooks.cap_prefill_at_reuse,
            around,
        ),
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req": (
            hooks.cap_chunk_at_reuse,
            before,
        ),
        "sglang.srt.managers.scheduler.Scheduler.get_init_info": (hooks.raise_limits, before),
        "sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens": (
            hooks.fit_exact,
            after,
        ),
        f"{_STREAMER}.get_cached_tokens_details": (hooks.report_recomputed, after),
        f"{_STATE}._add_memory_usage": (occupancy.report_state, after),
        f"{_STATE}.get_internal_state": (state.answer, around),
        f"{_STATE}._update_handlers": (on_requests.update_handlers, after),
        "sglang.srt.managers.schedule_batch.Req.__init__": (on_requests.scope_request, after),
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result": (
            on_requests.process_batch_result,
            around,
        ),
        "sglang.srt.managers.scheduler.Scheduler.abort_request": (
            on_requests.abort_request,
            before,
        ),
        f"{_TOKENIZER}._validate_one_request": (requests.check_request, before),
        f"{_TOKENIZER}._send_one_request": (shadow.sending, before),
        f"{_TOKENIZER}._handle_batch_output": (shadow.answering, before),
        **{
            f"{_CONTROL}.{verb}_expert_distribution_record": (requests.refuse_recording, before)
            for verb in ("start", "stop", "dump")
        },
        **{
            f"{_CONTROL}.{verb}_hicache_storage": (requests.refuse_storage, before)
            for verb in ("attach", "detach", "clear")
        },
        f"{_CONTROL}.start_profile": (requests.refuse_profile, before),
        f"{_CONTROL}.release_memory_occupation": (requests.refuse_offload, before),
        f"{_CONTROL}.resume_memory_occupation": (requests.refuse_offload, before),
        **{f"{_WEIGHTS}.{name}": (hooks.weights_change, before) for name in WEIGHT_CHANGES},
        **{target: (ours, HookType.REPLACE) for target, ours in on_cpu.items()},
    }


def register() -> None:
    """Entry point `sglang.srt.plugins`: runs once in every SGLang process."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    runtime = Runtime()
    if is_cpu():
        cpu_drafts.make_importable()

    def attention_backend(runner: Any) -> Any:
        verify()
        return runtime.attention_backend(runner)

    def radix_cache(ctx: Any) -> Any:
        verify()
        cache = runtime.radix_cache(ctx)
        publish(cache, ctx.server_args)
        tracer = engine_tracer()
        if tracer is not None:
            from kvtier_sglang.tracing.instrument import instrument

            instrument(cache, tracer)
        return cache

    register_attention_backend(NAME)(attention_backend)
    add_attention_backend_choices([NAME])
    register_radix_cache_backend(NAME, radix_cache)
    for target, (hook, kind) in hooks_of(runtime).items():
        HookRegistry.register(target, hook, kind)


def verify() -> None:
    """Raise StartupError unless every registration and hook is in force in this process."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.mem_cache.registry import get_radix_cache_factory

    missing = [target for target in hooks_of(Runtime()) if target not in HookRegistry._patched]
    if NAME not in ATTENTION_BACKENDS:
        missing.append("attention backend registration")
    if get_radix_cache_factory(NAME) is None:
        missing.append("radix cache registration")
    if missing:
        raise StartupError(
            "kvtier is installed but did not take effect in SGLang: " + ", ".join(missing)
        )


__all__ = ["hooks_of", "register", "verify"]

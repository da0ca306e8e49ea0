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

_MANAGERS = "sglang.srt.managers"
_COMPONENTS = f"{_MANAGERS}.scheduler_components"
_CONTROL = f"{_MANAGERS}.tokenizer_control_mixin.TokenizerControlMixin"
_TOKENIZER = f"{_MANAGERS}.tokenizer_manager.TokenizerManager"
_SCHEDULER = f"{_MANAGERS}.scheduler.Scheduler"
_ADDER = f"{_MANAGERS}.schedule_policy.PrefillAdder"
_STATE = f"{_COMPONENTS}.internal_state.SchedulerInternalStateController"
_STREAMER = f"{_COMPONENTS}.output_streamer.SchedulerOutputStreamer"
_WEIGHTS = f"{_COMPONENTS}.weight_updater.SchedulerWeightUpdaterManager"
_POOLS = "sglang.srt.mem_cache"
_CONFIGURATOR = f"{_POOLS}.kv_cache_configurator.KVCacheConfigurator"
_ARGUMENTS = "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments"
_BEAMS = "sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init"
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
    occupancy, shadow = Occupancy(), Shadow()
    on_requests = RequestHooks(lambda: runtime.memories, hooks.fit_exact)
    before, around, after = HookType.BEFORE, HookType.AROUND, HookType.AFTER
    found: dict[str, tuple[Callable[..., Any], HookType]] = {
        "sglang.srt.server_args.ServerArgs.resolve_once": (hooks.check_flags, before),
        _ARGUMENTS: (hooks.name_known_backend, around),
        f"{_CONFIGURATOR}.config_from_budget": (runtime.size_pools, around),
        f"{_CONFIGURATOR}._build_mha_kv_pool": (runtime.build_pool, around),
        f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator": (runtime.build_allocator, around),
        f"{_POOLS}.kv_cache_configurator.get_req_to_token_extra_context_len": (
            hooks.make_room_for_drafts,
            around,
        ),
        f"{_POOLS}.allocation.alloc_token_slots": (occupancy.observe_peak, after),
        f"{_POOLS}.base_prefix_cache.BasePrefixCache.update_eviction_metrics": (
            occupancy.count_evicted,
            after,
        ),
        "sglang.srt.layers.logits_processor.LogitsProcessor.forward": (
            runtime.measure_prompt_nll,
            around,
        ),
        "sglang.srt.models.utils.enable_fused_set_kv_buffer": (hooks.refuse_fused_write, around),
        f"{_SCHEDULER}._prefetch_kvcache": (hooks.ask_tier, before),
        f"{_SCHEDULER}._prefetch_after_device_hit_loss": (hooks.ask_tier_again, around),
        f"{_SCHEDULER}.get_init_info": (hooks.raise_limits, before),
        f"{_SCHEDULER}._add_request_to_queue": (on_requests.queue_request, before),
        f"{_SCHEDULER}.process_batch_result": (on_requests.process_batch_result, around),
        f"{_SCHEDULER}.abort_request": (on_requests.abort_request, before),
        _BEAMS: (hooks.refuse_beams, around),
        f"{_ADDER}._check_prefill_budget": (hooks.admit_streaming, around),
        f"{_ADDER}._select_prefill_admission": (hooks.cap_prefill_at_reuse, around),
        f"{_ADDER}.add_chunked_req": (hooks.cap_chunk_at_reuse, before),
        f"{_STREAMER}.get_cached_tokens_details": (hooks.report_recomputed, after),
        f"{_STATE}._add_memory_usage": (occupancy.report_state, after),
        f"{_STATE}.get_internal_state": (state.answer, around),
        f"{_STATE}._update_handlers": (on_requests.update_handlers, after),
        f"{_MANAGERS}.schedule_batch.Req.__init__": (on_requests.scope_request, after),
        f"{_TOKENIZER}._validate_one_request": (requests.check_request, before),
        f"{_TOKENIZER}._send_one_request": (shadow.sending, before),
        f"{_TOKENIZER}._handle_batch_output": (shadow.answering, before),
        f"{_CONTROL}.start_profile": (requests.refuse_profile, before),
        f"{_CONTROL}.release_memory_occupation": (requests.refuse_offload, before),
        f"{_CONTROL}.resume_memory_occupation": (requests.refuse_offload, before),
    }
    for verb in ("start", "stop", "dump"):
        target = f"{_CONTROL}.{verb}_expert_distribution_record"
        found[target] = (requests.refuse_recording, before)
    for verb in ("attach", "detach", "clear"):
        found[f"{_CONTROL}.{verb}_hicache_storage"] = (requests.refuse_storage, before)
    for name in WEIGHT_CHANGES:
        found[f"{_WEIGHTS}.{name}"] = (hooks.weights_change, before)
    if is_cpu():
        for target, ours in cpu_drafts.functions().items():
            found[target] = (ours, HookType.REPLACE)
        if sglang_version() < (0, 5, 23):
            groups = "sglang.srt.distributed.parallel_state.init_model_parallel_group"
            found[groups] = (hooks.go_without_nccl, before)
    return found


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

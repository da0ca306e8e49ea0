"""Flags of SGLang that cannot be combined with kvtier, refused before any model loads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from kvtier.calibration.defaults import with_calibration
from kvtier.calibration.documents import load_curve
from kvtier.config import Settings, load_settings
from kvtier.errors import ConfigurationError, IncompatibleFlagError
from kvtier.heads.model.config import model_name, model_shape, weights_revision
from kvtier.heads.model.support import windows_of
from kvtier.heads.profile import ModelShape, load_profile
from kvtier.memory.storage import check_may_be_served, directories, load_card
from kvtier.retention.rules import scorer_of
from kvtier.retention.shares import configured_share
from kvtier_kernels import (
    AUTO,
    AttentionKernels,
    KernelUnavailableError,
    available_kernels,
    get_kernels,
)
from kvtier_sglang.cpu_drafts import FIRST_VERSION
from kvtier_sglang.support import check_config
from kvtier_sglang.versions import TESTED, is_tested, sglang_version

NAME = "kvtier"
# KV caches of one byte a number.
FP8 = ("fp8_e4m3", "fp8_e5m2")
logger = logging.getLogger(__name__)

# field -> (is it acceptable?, what is expected). Checked when attention or radix is ours.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "speculative_algorithm": (
        lambda v: v is None or str(v).upper() == "NGRAM",
        "NGRAM, or none (docs/speculation.md says what draft models lack),",
    ),
    "disaggregation_mode": (lambda v: v in (None, "null"), "no disaggregation"),
    "enable_hierarchical_cache": (lambda v: not v, "no HiCache"),
    "enable_lmcache": (lambda v: not v, "no LMCache"),
    "enable_flexkv": (lambda v: not v, "no FlexKV"),
    "enable_unified_memory": (lambda v: not v, "no unified memory pool"),
    "enable_unified_cache_external_linker": (lambda v: not v, "no linker to another cache"),
    # It counts tokens in SGLang's own tree.
    "radix_eviction_policy": (
        lambda v: str(v).lower() != "tlru",
        "lru, lfu, slru or priority",
    ),
    "enable_pdmux": (lambda v: not v, "no multiplexed prefill and decoding"),
    "enable_two_batch_overlap": (lambda v: not v, "no overlap of two batches"),
    "enable_single_batch_overlap": (lambda v: not v, "no overlap within a batch"),
    # Attention that is not causal.
    "dllm_algorithm": (lambda v: not v, "no diffusion language model"),
    "enable_session_radix_cache": (lambda v: not v, "no session radix cache"),
    "enable_streaming_session": (lambda v: not v, "no streaming sessions"),
    "enable_hisparse": (lambda v: not v, "no HiSparse"),
    # Without a kept tree there are no turns to compress.
    "disable_radix_cache": (lambda v: not v, "the radix cache enabled"),
    "strip_thinking_cache": (lambda v: not v, "no stripped thinking tokens"),
    "enable_memory_saver": (lambda v: not v, "no memory saver"),
    # SGLang keeps them by slot, of which a compressed turn has none.
    "enable_return_routed_experts": (lambda v: not v, "no routed experts in answers"),
    "kv_events_config": (lambda v: not v, "no KV cache events"),
    "pp_size": (lambda v: v in (None, 1), "a pipeline of one stage"),
    "attn_cp_size": (lambda v: v in (None, 1), "an attention context parallelism of 1"),
    "dcp_size": (lambda v: v in (None, 1), "a decode context parallelism of 1"),
    "kv_cache_dtype": (
        lambda v: v in (None, "auto", "bfloat16", "bf16", *FP8),
        f"an unquantised KV cache, {' or '.join(FP8)}",
    ),
    "decode_attention_backend": (lambda v: v in (None, NAME), "the same backend throughout"),
    "prefill_attention_backend": (lambda v: v in (None, NAME), "the same backend throughout"),
}


# Models in which a picture's tokens attend to all of it, which the backend does not compute. SGLang
# serves their text alone where it is not asked for more.
_SEE_AHEAD = frozenset({"Gemma3ForConditionalGeneration"})


def attention_is_ours() -> bool:
    """Return whether the attention backend of this process's server is kvtier's."""
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().kernel.attention_backend == NAME)


def cache_is_ours() -> bool:
    """Return whether its radix cache is."""
    from sglang.srt.runtime_context import get_memory

    return bool(get_memory().radix_cache_backend == NAME)


def settings_of(server_args: Any) -> Settings:
    """The settings of a server, with what they leave open as its model's calibration says."""
    return with_calibration(
        load_settings(),
        server_args.model_path,
        revision=getattr(server_args, "revision", None),
        ranks=getattr(server_args, "tp_size", None) or 1,
    )


def uses_kvtier(server_args: Any) -> bool:
    """Return whether any part of kvtier was asked for."""
    return NAME in (server_args.attention_backend, server_args.radix_cache_backend)


def check_server_args(server_args: Any, settings: Settings) -> None:
    """Raise IncompatibleFlagError (or ConfigurationError, or a model or profile error) naming the
    first obstacle.

    server_args: SGLang's ServerArgs before resolution; untouched.
    """
    if not uses_kvtier(server_args):
        return
    for field, (acceptable, expected) in _RULES.items():
        value = getattr(server_args, field, None)
        flag = "--" + field.replace("_", "-")
        _refuse_if(not acceptable(value), flag, f"{expected} together with kvtier", value)
    _check_combinations(server_args, settings)
    # Published memories are looked up when the pool is planned: a store may be away.
    if settings.memory_folder is not None:
        for folder in directories(settings.memory_folder):
            check_may_be_served(load_card(folder))
    _check_codes(server_args, settings)
    # Called for what they refuse.
    kernels_of(settings, server_args)
    scorer_of(settings)
    configured_share(settings)
    attention = server_args.attention_backend
    _refuse_if(
        server_args.radix_cache_backend == NAME and attention != NAME,
        "--attention-backend",
        "kvtier together with --radix-cache-backend kvtier",
        attention,
    )
    config = check_config(server_args)
    if config is None:
        return
    seen = _SEE_AHEAD.intersection(config.get("architectures") or ())
    expected = f"no pictures together with kvtier and {', '.join(seen)}, text alone"
    pictures = bool(getattr(server_args, "enable_multimodal", None))
    _refuse_if(bool(seen) and pictures, "--enable-multimodal", expected, True)
    if windows_of(config):
        _check_windows(server_args, settings)
    shape, ranks = model_shape(config), getattr(server_args, "tp_size", None) or 1
    for is_asked, where in (
        (settings.compacts, "where a retention is set"),
        (settings.memory is not None, "beside --memory"),
    ):
        # Heads are told apart there.
        expected = f"at most the model's {shape.num_kv_heads} KV heads {where}"
        _refuse_if(is_asked and ranks > shape.num_kv_heads, "--tp-size", expected, ranks)
    check_documents(settings, shape, server_args)


def _refuse_if(is_asked: bool, flag: str, expected: str, value: Any) -> None:
    if is_asked:
        raise IncompatibleFlagError(flag, expected, value)


def check_documents(settings: Settings, shape: ModelShape, server_args: Any) -> None:
    """Raise HeadProfileMismatchError, UsageError or CalibrationMismatchError where the head
    profile, the fitted weights or the curve that were given are of another model.

    Of a model that is not on this machine, only the shape can be compared.
    """
    scorer = scorer_of(settings)
    is_fitted = settings.compacts and scorer.is_fitted
    if settings.head_profile is None and settings.curve is None and not is_fitted:
        return
    model_path = server_args.model_path
    revision = weights_revision(model_path, getattr(server_args, "revision", None))
    if settings.head_profile is not None:
        load_profile(settings.head_profile).check_fits(shape, revision)
    if is_fitted:
        scorer.check_fits(shape.num_layers, shape.num_kv_heads, shape.head_dim, revision)
    if settings.curve is not None:
        curve = load_curve(settings.curve)
        curve.check_fits(model_name(model_path), revision, curve.policy, curve.dtype)


def _check_combinations(server_args: Any, settings: Settings) -> None:
    """Raise IncompatibleFlagError for flags of SGLang's and settings of kvtier's that do not go
    together, whatever the model."""
    has_gpu = torch.cuda.is_available()
    # SGLang's CPU graphs, which it records with it, ask backends for calls of their own.
    compiles = bool(getattr(server_args, "enable_torch_compile", False)) and not has_gpu
    expected = "no torch.compile together with kvtier on a CPU"
    _refuse_if(compiles, "--enable-torch-compile", expected, True)
    # The requests of a mixed batch that decode would be taken for requests that prefill.
    mixed = bool(getattr(server_args, "enable_mixed_chunk", False))
    expected = "no mixed chunks together with kvtier and --memory"
    _refuse_if(mixed and settings.memory is not None, "--enable-mixed-chunk", expected, True)
    ranks = getattr(server_args, "tp_size", None) or 1
    is_asked = ranks > 1 and bool(getattr(server_args, "enable_dp_attention", False))
    expected = "1 together with kvtier and --enable-dp-attention"
    _refuse_if(is_asked, "--tp-size", expected, ranks)
    drafts = getattr(server_args, "speculative_algorithm", None)
    is_cpu = getattr(server_args, "device", None) == "cpu" or not has_gpu
    is_older = sglang_version() < FIRST_VERSION
    expected = "none on a CPU together with kvtier and an SGLang before 0.5.23"
    is_asked = is_older and is_cpu and drafts is not None
    _refuse_if(is_asked, "--speculative-algorithm", expected, drafts)
    cache = getattr(server_args, "radix_cache_backend", None)
    for other, is_asked in (
        ("--speculative-algorithm", bool(drafts)),
        ("--radix-cache-backend of another cache", cache != NAME),
    ):
        is_asked = is_asked and settings.memory is not None
        _refuse_if(is_asked, "--memory", f"none together with {other}", settings.memory)


def _check_codes(server_args: Any, settings: Settings) -> None:
    """Raise IncompatibleFlagError for what does not go together with codes of kept entries."""
    dtype = settings.kept_dtype
    for other, is_asked in (
        ("--kv-cache-dtype fp8", getattr(server_args, "kv_cache_dtype", None) in FP8),
        # Every head of a model that is not calibrated keeps everything.
        ("heads that do not compete: calibrate the model", not settings.competes),
    ):
        is_asked = is_asked and dtype is not None
        _refuse_if(is_asked, "--kept-dtype", f"none together with {other}", dtype)


def _check_windows(server_args: Any, settings: Settings) -> None:
    """Raise IncompatibleFlagError for what does not go together with layers that attend to their
    newest tokens only."""
    drafts = getattr(server_args, "speculative_algorithm", None)
    reuse, profile = settings.reuse_behind_edits, settings.head_profile
    equal = settings.compacts and not settings.competes
    for flag, is_asked, expected, value in (
        ("--speculative-algorithm", drafts is not None, "none", drafts),
        ("--memory", settings.memory is not None, "none", settings.memory),
        ("--head-profile", profile is not None, "none", profile),
        ("--refresh", settings.refresh.is_on, "off", settings.refresh.when),
        ("--reuse-behind-edits", reuse == "on", "auto or off", reuse),
        ("--head-budgets", equal, "adaptive, where a share is kept,", settings.head_budgets),
    ):
        where = "together with a model of which some layers have a window"
        _refuse_if(is_asked, flag, f"{expected} {where}", value)


def say_if_not_tested() -> None:
    """One line where SGLang is of a version that kvtier has not been tested with."""
    if not is_tested():
        tested = " and ".join(".".join(map(str, one)) for one in TESTED)
        found = ".".join(map(str, sglang_version()))
        logger.warning("SGLang %s: kvtier has been tested with %s", found, tested)


def is_resolved(server_args: Any) -> bool:
    """Return whether SGLang has derived everything from the arguments, which are read-only
    since."""
    return bool(getattr(server_args, "_resolution_finished", False))


def settle_tokens(server_args: Any) -> None:
    """Let SGLang count single tokens, whatever page size was asked for: requests share prefixes
    token by token, and the pages that heads keep are the pool's own. Keep the tokens of layers with
    a window where those of all layers are: what left a window goes when its turn ends.

    server_args: before resolution; its `page_size` and `disable_hybrid_swa_memory` may be set.
    """
    asked = getattr(server_args, "page_size", None)
    if asked is not None and asked > 1:
        logger.info("--page-size %d: kvtier's prefixes end at any token, as with pages of 1", asked)
        server_args.page_size = 1
    server_args.disable_hybrid_swa_memory = True


def settle_cuda_graphs(server_args: Any, settings: Settings) -> None:
    """Turn off the CUDA graphs that cannot be recorded over kvtier, so that users need not know.

    server_args: before resolution; its `disable_*_cuda_graph` may be set. Raises
    IncompatibleFlagError for graphs that were asked for by name.
    """
    if getattr(server_args, "device", None) == "cpu" or not torch.cuda.is_available():
        return
    decode = _graph_obstacle(settings, server_args)
    obstacles = {"prefill": "together with kvtier", "decode": decode}
    for phase, why in obstacles.items():
        if why is None:
            continue
        flag, asked = _graphs_asked_for(server_args, phase)
        if asked not in (None, "disabled"):
            raise IncompatibleFlagError(flag, f"{phase} disabled {why}", asked)
        if phase == "decode" and not getattr(server_args, "disable_cuda_graph", False):
            logger.info("decoding goes without CUDA graphs %s", why)
        setattr(server_args, f"disable_{phase}_cuda_graph", True)


def _graphs_asked_for(server_args: Any, phase: str) -> tuple[str, str | None]:
    """The flag and the backend that the user chose, as SGLang would find them: its JSON before its
    flag. What SGLang itself will refuse does not count."""
    config: Any = getattr(server_args, "cuda_graph_config", None)
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    of_phase = config.get(phase) if isinstance(config, dict) else None
    if isinstance(of_phase, dict) and "backend" in of_phase:
        return "--cuda-graph-config", of_phase["backend"]
    return f"--cuda-graph-backend-{phase}", getattr(
        server_args, f"cuda_graph_backend_{phase}", None
    )


def kernels_of(settings: Settings, server_args: Any) -> AttentionKernels:
    """The backend that will serve. Raises ConfigurationError for a name that there is none of, and
    where this machine cannot run it."""
    names = (AUTO, *available_kernels())
    if settings.kernels not in names:
        raise ConfigurationError("kernels", f"one of {', '.join(names)}", settings.kernels)
    try:
        return get_kernels(settings.kernels, getattr(server_args, "device", None))
    except KernelUnavailableError as error:
        why = str(error).removeprefix("kernels: ")
        raise ConfigurationError("kernels", "a backend that can run here", why) from error


def _graph_obstacle(settings: Settings, server_args: Any) -> str | None:
    """Return what keeps CUDA graphs from recording decoding, if anything does."""
    if not kernels_of(settings, server_args).plans_on_device:
        return f"together with --kernels {settings.kernels}, which plans on the host"
    if getattr(server_args, "speculative_algorithm", None) is not None:
        return "together with --speculative-algorithm, whose drafts are verified without them"
    return None

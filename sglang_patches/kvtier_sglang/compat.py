"""Flags of SGLang that cannot be combined with kvtier, refused before any model loads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
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


def backends_are_ours() -> tuple[bool, bool]:
    """Return whether (attention, radix cache) of this process's server are kvtier's."""
    from sglang.srt.runtime_context import get_exec, get_memory

    return (
        get_exec().kernel.attention_backend == NAME,
        get_memory().radix_cache_backend == NAME,
    )


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
    """Raise IncompatibleFlagError (or a model or profile error) naming the first obstacle.

    server_args: SGLang's ServerArgs before resolution; untouched.
    """
    if not uses_kvtier(server_args):
        return
    for field, (acceptable, expected) in _RULES.items():
        value = getattr(server_args, field, None)
        if not acceptable(value):
            flag = "--" + field.replace("_", "-")
            raise IncompatibleFlagError(flag, f"{expected} together with kvtier", value)
    compiles = bool(getattr(server_args, "enable_torch_compile", False))
    if compiles and not torch.cuda.is_available():
        # SGLang's CPU graphs, which it records with it, ask backends for calls of their own.
        expected = "no torch.compile together with kvtier on a CPU"
        raise IncompatibleFlagError("--enable-torch-compile", expected, True)
    _check_mixed_chunks(server_args, settings)
    _check_ranks(server_args, settings)
    _check_drafts(server_args, settings)
    _check_memory(server_args, settings)
    _check_codes(server_args, settings)
    scorer_of(settings)
    configured_share(settings)
    if server_args.radix_cache_backend == NAME and server_args.attention_backend != NAME:
        raise IncompatibleFlagError(
            "--attention-backend",
            "kvtier together with --radix-cache-backend kvtier",
            server_args.attention_backend,
        )
    config = check_config(server_args)
    if config is None:
        return
    _check_pictures(server_args, config)
    if windows_of(config):
        _check_windows(server_args, settings)
    shape = model_shape(config)
    _check_heads_of_ranks(server_args, settings, shape.num_kv_heads)
    check_documents(settings, shape, server_args)


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


def _check_heads_of_ranks(server_args: Any, settings: Settings, heads: int) -> None:
    """Raise IncompatibleFlagError for more ranks than KV heads where heads are told apart."""
    ranks = getattr(server_args, "tp_size", None) or 1
    for is_asked, where in (
        (settings.compacts, "where a retention is set"),
        (settings.memory is not None, "beside --memory"),
    ):
        if is_asked and ranks > heads:
            expected = f"at most the model's {heads} KV heads {where}"
            raise IncompatibleFlagError("--tp-size", expected, ranks)


def _check_mixed_chunks(server_args: Any, settings: Settings) -> None:
    """Raise IncompatibleFlagError for what would take the requests of a mixed batch that decode for
    requests that prefill."""
    obstacles = {
        "--refresh N or --refresh-moved": settings.refresh.while_generating,
        "--memory": settings.memory is not None,
    }
    for other, is_asked in obstacles.items():
        if is_asked and getattr(server_args, "enable_mixed_chunk", False):
            expected = f"no mixed chunks together with kvtier and {other}"
            raise IncompatibleFlagError("--enable-mixed-chunk", expected, True)


def _check_ranks(server_args: Any, settings: Settings) -> None:
    """Raise IncompatibleFlagError for what tensor parallel ranks cannot do together."""
    ranks = getattr(server_args, "tp_size", None) or 1
    if ranks == 1:
        return
    obstacles = {
        "--refresh N or --refresh-moved": settings.refresh.while_generating,
        "--refresh-by near-data": settings.refresh.by == "near-data",
        "--enable-dp-attention": bool(getattr(server_args, "enable_dp_attention", False)),
    }
    for other, is_asked in obstacles.items():
        if is_asked:
            raise IncompatibleFlagError("--tp-size", f"1 together with kvtier and {other}", ranks)


def _check_memory(server_args: Any, settings: Settings) -> None:
    """Raise IncompatibleFlagError for what does not go together with prefix memories."""
    if settings.memory is None:
        return
    obstacles = {
        "--speculative-algorithm": bool(getattr(server_args, "speculative_algorithm", None)),
        "--radix-cache-backend of another cache": (
            getattr(server_args, "radix_cache_backend", None) != NAME
        ),
    }
    for other, is_asked in obstacles.items():
        if is_asked:
            expected = f"none together with {other}"
            raise IncompatibleFlagError("--memory", expected, settings.memory)
    # Published memories are looked up when the pool is planned: a store may be away.
    if settings.memory_folder is not None:
        for folder in directories(settings.memory_folder):
            check_may_be_served(load_card(folder))


def _check_codes(server_args: Any, settings: Settings) -> None:
    """Raise IncompatibleFlagError for what does not go together with codes of kept entries."""
    kernels = kernels_of(settings, server_args)
    if settings.kept_dtype is None:
        return
    obstacles = {
        f"--kernels {kernels.name}": not kernels.lists.reads_codes,
        "--kv-cache-dtype fp8": getattr(server_args, "kv_cache_dtype", None) in FP8,
        # Every head of a model that is not calibrated keeps everything.
        "heads that do not compete: calibrate the model": not settings.competes,
    }
    for other, is_asked in obstacles.items():
        if is_asked:
            raise IncompatibleFlagError(
                "--kept-dtype", f"none together with {other}", settings.kept_dtype
            )


def _check_pictures(server_args: Any, config: Mapping[str, Any]) -> None:
    """Raise IncompatibleFlagError where a picture's tokens would attend to those behind them."""
    seen = _SEE_AHEAD.intersection(config.get("architectures") or ())
    if seen and getattr(server_args, "enable_multimodal", None):
        expected = f"no pictures together with kvtier and {', '.join(seen)}, text alone"
        raise IncompatibleFlagError("--enable-multimodal", expected, True)


def _check_windows(server_args: Any, settings: Settings) -> None:
    """Raise IncompatibleFlagError for what does not go together with layers that attend to their
    newest tokens only."""
    drafts = getattr(server_args, "speculative_algorithm", None)
    reuse = settings.reuse_behind_edits
    obstacles = {
        "--speculative-algorithm": (drafts is not None, "none", drafts),
        "--memory": (settings.memory is not None, "none", settings.memory),
        "--head-profile": (settings.head_profile is not None, "none", settings.head_profile),
        "--refresh": (settings.refresh.is_on, "off", settings.refresh.when),
        "--reuse-behind-edits": (reuse == "on", "auto or off", reuse),
        "--head-budgets": (
            settings.compacts and not settings.competes,
            "adaptive, where a share is kept,",
            settings.head_budgets,
        ),
    }
    for flag, (is_asked, expected, value) in obstacles.items():
        if is_asked:
            where = "together with a model of which some layers have a window"
            raise IncompatibleFlagError(flag, f"{expected} {where}", value)


def _check_drafts(server_args: Any, settings: Settings) -> None:
    """Raise IncompatibleFlagError for what does not go together with drafted tokens."""
    algorithm = getattr(server_args, "speculative_algorithm", None)
    if algorithm is None:
        return
    is_cpu = getattr(server_args, "device", None) == "cpu" or not torch.cuda.is_available()
    if is_cpu and sglang_version() < FIRST_VERSION:
        expected = "none on a CPU together with kvtier and an SGLang before 0.5.23"
        raise IncompatibleFlagError("--speculative-algorithm", expected, algorithm)
    if settings.refresh.while_generating:
        expected = "none together with kvtier and --refresh N or --refresh-moved"
        raise IncompatibleFlagError("--speculative-algorithm", expected, algorithm)


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


def settle_page_size(server_args: Any) -> None:
    """Let SGLang count single tokens, whatever page size was asked for: requests share prefixes
    token by token, and the pages that heads keep are the pool's own.

    server_args: before resolution; its `page_size` may be set.
    """
    asked = getattr(server_args, "page_size", None)
    if uses_kvtier(server_args) and asked is not None and asked > 1:
        logger.info("--page-size %d: kvtier's prefixes end at any token, as with pages of 1", asked)
        server_args.page_size = 1


def settle_windows(server_args: Any) -> None:
    """Keep the tokens of layers with a window where those of all layers are: what left a window
    goes when its turn ends.

    server_args: before resolution; its `disable_hybrid_swa_memory` may be set.
    """
    if uses_kvtier(server_args):
        server_args.disable_hybrid_swa_memory = True


def settle_cuda_graphs(server_args: Any, settings: Settings) -> None:
    """Turn off the CUDA graphs that cannot be recorded over kvtier, so that users need not know.

    server_args: before resolution; its `disable_*_cuda_graph` may be set. Raises
    IncompatibleFlagError for graphs that were asked for by name.
    """
    if not uses_kvtier(server_args) or not torch.cuda.is_available():
        return
    if getattr(server_args, "device", None) == "cpu":
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
    if settings.refresh.while_generating:
        return "together with --refresh N and --refresh-moved, which look at each token's queries"
    return None

"""Requests that cannot be served as they are asked, refused with a 400 before a scheduler sees
them: they would end it.

In the process that takes requests, for servers that use kvtier.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import torch
from fastapi import HTTPException

from kvtier.errors import UsageError
from kvtier_sglang import compat
from kvtier_sglang.compat import NAME
from kvtier_sglang.request_options import asked_of


def check_request(manager: Any, obj: Any, input_ids: Sequence[int] | None) -> None:
    """BEFORE TokenizerManager._validate_one_request. Raises UsageError, which SGLang answers.

    obj: one GenerateReqInput or EmbeddingReqInput; input_ids: its prompt, None where it has
    embeddings instead.
    """
    if not compat.uses_kvtier(manager.server_args):
        return
    if input_ids is not None and len(input_ids) == 0:
        raise UsageError("input", "at least one token", "")
    params = getattr(obj, "sampling_params", None)
    if isinstance(params, dict):
        asked_of(params.get("custom_params"))
    if manager.model_config.model_is_mrope and obj.contains_mm_input():
        _check_pictures(manager)
    if getattr(obj, "return_logprob", False) and obj.logprob_start_len < -1:
        expected = "a position, or -1 for the answer alone"
        raise UsageError("logprob_start_len", expected, obj.logprob_start_len)


def _check_pictures(manager: Any) -> None:
    """Raise UsageError where keys are compared as if text alone had turned them."""
    if not hasattr(manager, "kvtier_compares_keys"):
        # The settings are asked once: a calibration may be in files or in Redis.
        settings = compat.settings_of(manager.server_args)
        manager.kvtier_compares_keys = settings.compacts or settings.memory is not None
    if manager.kvtier_compares_keys:
        expected = "text alone beside a share or a memory: this model's keys are turned by places "
        raise UsageError("image_data", f"{expected}in pictures", "a picture, a video or sound")


def refuse_offload(manager: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE release_memory_occupation and resume_memory_occupation: without a memory saver, which
    kvtier refuses at start-up, either ends a scheduler. Raises UsageError."""
    if compat.uses_kvtier(manager.server_args):
        raise UsageError(
            "memory occupation", "a server with a memory saver, which kvtier has none of", "none"
        )


def refuse_recording(manager: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE the calls that start, stop and dump a record of experts: a scheduler without a
    recorder ends at them, SGLang's own, too."""
    if compat.uses_kvtier(manager.server_args) and not _records(manager.server_args):
        _refuse("record", "a server with --expert-distribution-recorder-mode", "none")


def refuse_profile(manager: Any, req: Any = None, *args: Any, **kwargs: Any) -> None:
    """BEFORE start_profile: on a CPU a scheduler ends at recorders of a GPU's memory or calls."""
    activities = set(getattr(req, "activities", None) or ())
    recorders = activities & {"MEM", "CUDA_PROFILER", "RPD"}
    if recorders and not torch.cuda.is_available() and compat.uses_kvtier(manager.server_args):
        _refuse("activities", "CPU on a server without a GPU", sorted(recorders))


def refuse_storage(manager: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE the calls that attach, detach and clear HiCache's storage, which kvtier's cache does
    not have: its tier is a service of its own."""
    if manager.server_args.radix_cache_backend == NAME:
        _refuse("storage backend", "a server with HiCache", "kvtier's tier")


def _records(server_args: Any) -> bool:
    return getattr(server_args, "expert_distribution_recorder_mode", None) is not None


def _refuse(argument: str, expected: str, got: object) -> None:
    """Answer 400: these endpoints turn no error of ours into an answer."""
    error = UsageError(argument, expected, got)
    raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from error

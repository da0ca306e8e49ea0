"""Requests that cannot be served as they are asked, refused with a 400 before a scheduler sees
them: some would end it, and one would be answered with other numbers than were asked for.

In the process that takes requests, for servers that use kvtier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.config import load_settings
from kvtier.errors import UsageError
from kvtier_sglang import compat


def check_request(manager: Any, obj: Any, input_ids: Sequence[int] | None) -> None:
    """BEFORE TokenizerManager._validate_one_request. Raises UsageError, which SGLang answers.

    obj: one GenerateReqInput or EmbeddingReqInput; input_ids: its prompt, None where it has
    embeddings instead.
    """
    if not compat.uses_kvtier(manager.server_args):
        return
    if input_ids is not None and len(input_ids) == 0:
        raise UsageError("input", "at least one token", "")
    if getattr(obj, "return_logprob", False):
        _check_prompt_logprobs(obj.logprob_start_len)


def _check_prompt_logprobs(start: int) -> None:
    if start < -1:
        raise UsageError("logprob_start_len", "a position, or -1 for the answer alone", start)
    if start >= 0 and load_settings().prefill == "streaming":
        raise UsageError(
            "logprob_start_len", "-1 where kvtier serves with --prefill streaming: not exact", start
        )


def refuse_offload(manager: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE release_memory_occupation and resume_memory_occupation: without a memory saver, which
    kvtier refuses at start-up, either ends a scheduler. Raises UsageError."""
    if compat.uses_kvtier(manager.server_args):
        raise UsageError(
            "memory occupation", "a server with a memory saver, which kvtier has none of", "none"
        )


__all__ = ["check_request", "refuse_offload"]

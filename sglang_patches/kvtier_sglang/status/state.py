"""A scheduler's answer to the status page, over the road of SGLang's internal state.

The page's process asks with a GetInternalStateReq whose `rid` is QUESTION: the same message, with
the same fan-out to data parallel replicas. The answer has nothing of the server's arguments in it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from kvtier_sglang.compression.compressor import Compressor
from kvtier_sglang.compression.selection import AdaptiveSelection, ProfileSelection
from kvtier_sglang.radix.cache import KvtierRadixCache
from kvtier_sglang.status.figures import read_all
from kvtier_sglang.status.sessions import sessions

QUESTION = "kvtier-status"
# The answer's internal state has it by this name.
ANSWER = "kvtier_status"
MOST_SESSIONS = 200


def answer(original: Callable[..., Any], controller: Any, request: Any) -> Any:
    """AROUND SchedulerInternalStateController.get_internal_state: answer the page's question, and
    hand on any other request."""
    if request.rid != QUESTION:
        return original(controller, request)
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    cache = controller.scheduler.tree_cache
    found = status_of(cache) if isinstance(cache, KvtierRadixCache) else None
    return GetInternalStateReqOutput(internal_state={ANSWER: found})


def status_of(cache: KvtierRadixCache) -> dict[str, Any]:
    """Return all that the page shows of one replica. Only the scheduler's thread may call it."""
    began = time.monotonic()
    status = {
        "policy": _policy(cache),
        "figures": read_all(cache),
        "retention": _retention(cache.compressor),
        "memories": None if cache.memories is None else cache.memories.report(),
        "ranks": cache.ranks.size,
        "sessions": sessions(cache, MOST_SESSIONS),
    }
    return status | {"took_s": time.monotonic() - began}


def _policy(cache: KvtierRadixCache) -> dict[str, Any]:
    """Return the settings that decide what is kept."""
    pool, compressor, rule = cache.allocator.pool, cache.compressor, cache.compressor.rule
    selection, scorer = compressor.selection, compressor.scorer
    profile = selection.profile if isinstance(selection, ProfileSelection) else None
    heads = pool.layer_num * pool.head_num
    return {
        "ca_heads": heads if profile is None else profile.num_ca_heads,
        "heads": heads,
        "head_method": "full" if profile is None else profile.method,
        "heads_compete": isinstance(selection, AdaptiveSelection),
        "sink_tokens": rule.sink_tokens,
        "recent_tokens": rule.recent_tokens,
        "recent_of": rule.recent_of,
        "compensation": rule.compensation,
        "share_rule": compressor.share.name,
        "share": _numbers(compressor.share),
        "scorer": None if scorer is None else scorer.name,
    }


def _numbers(rule: Any) -> dict[str, float]:
    """Return a share rule's own numbers, by their names."""
    if not dataclasses.is_dataclass(rule):
        return {}
    values = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _retention(compressor: Compressor) -> dict[str, Any]:
    """Return what the share rule chose, over all turns that had something to drop."""
    retention = compressor.retention
    return {
        "prompt_tokens": retention.prompt_tokens,
        "kept_tokens": retention.kept_tokens,
        "reasons": dict(retention.reasons),
    }

"""The context that a path of the tree is for a refresh: the ranges that were pruned, and how far it
is exact. A restored context is refreshed from the very KV that it was restored from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvtier.retention.refreshing import PrunedRange
from kvtier.tier.blobs.keys import Scope
from kvtier.tier.prefetch import Landed
from kvtier_sglang.pool.packed import slots_as_entries
from kvtier_sglang.radix.node import KvNode
from kvtier_sglang.radix.request_states import RequestState
from kvtier_sglang.refresh.state import CompactedContext
from kvtier_sglang.refresh.turn_refresh import TurnRefresh
from kvtier_sglang.tier.connector import TierConnector

logger = logging.getLogger(__name__)


def pruned_ranges(node: KvNode, *, is_coded: bool) -> list[PrunedRange]:
    """Return the ranges of the context up to `node` of which anchored heads keep a part, first to
    last. A range whose coded entries would not fit it uncoded is left out."""
    found = []
    for one in node.path():
        begin, end = one.dropped
        kept = one.kept
        needed = slots_as_entries(kept) if is_coded else kept
        if 0 < kept < end - begin >= needed and one.num_slots < len(one.key):
            found.append(PrunedRange(one.start + begin, one.start + end, kept))
    return sorted(found, key=lambda pruned: pruned.begin)


def compacted_context(
    node: KvNode, token_ids: Sequence[int], scope: Scope, *, is_coded: bool
) -> CompactedContext | None:
    """Return the context up to `node`, for a refresh; None where it has no pruned range."""
    ranges = pruned_ranges(node, is_coded=is_coded)
    if not ranges:
        return None
    exact_stop = max((one.stop for one in node.path() if one.exact), default=0)
    return CompactedContext(token_ids, ranges, exact_stop, scope)


def offer_restored(
    refresh: TurnRefresh,
    tier: TierConnector,
    req: Any,
    state: RequestState,
    node: KvNode,
    landed: Landed,
    *,
    is_coded: bool,
) -> bool:
    """Offer a restored context for a refresh, and return whether it will have one. The refresh then
    owns what landed. An error over what came from elsewhere must not end the scheduler here,
    either: it is logged."""
    filled = len(req.full_untruncated_fill_ids)
    try:
        scope = tier.scope(state, req.extra_key, req.cache_salt)
        ids = req.full_untruncated_fill_ids[: node.stop]
        context = None
        if scope is not None:
            context = compacted_context(node, ids, scope, is_coded=is_coded)
        if context is None or context.ranges[0].begin < landed.begin:
            return False
        refresh.offer_restored(state, context, landed.host, filled)
    except Exception:
        logger.exception("a restored context cannot be refreshed; it is used as it was")
        tier.counters["refresh_restored_failed"] += 1
        return False
    return True


__all__ = ["compacted_context", "offer_restored", "pruned_ranges"]

"""A context that was restored is refreshed from the very KV that it was restored from."""

from __future__ import annotations

import logging
from typing import Any

from kvtier.tier.prefetch.lookup import Landed
from kvtier_sglang.radix.contexts import compacted_context
from kvtier_sglang.radix.node import KvNode
from kvtier_sglang.refresh.turn_refresh import TurnRefresh
from kvtier_sglang.tier.connector import TierConnector

logger = logging.getLogger(__name__)


def offer_restored(
    refresh: TurnRefresh, tier: TierConnector, req: Any, node: KvNode, landed: Landed
) -> bool:
    """Whether a restored context will be refreshed, which then owns what landed. What came from
    elsewhere must not end the scheduler here, either."""
    filled = len(req.full_untruncated_fill_ids)
    try:
        scope = tier.scope(req.rid, req.extra_key, req.cache_salt)
        ids = req.full_untruncated_fill_ids[: node.stop]
        context = None if scope is None else compacted_context(node, ids, scope)
        if context is None or context.ranges[0].begin < landed.begin:
            return False
        refresh.offer_restored(req.rid, context, landed.host, filled)
    except Exception:
        logger.exception("a restored context cannot be refreshed; it is used as it was")
        tier.counters["refresh_restored_failed"] += 1
        return False
    return True


__all__ = ["offer_restored"]

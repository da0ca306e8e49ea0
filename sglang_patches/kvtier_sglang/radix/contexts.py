"""What a path of the tree is as one context: which ranges were pruned, and what is exact."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.retention.refreshing import PrunedRange
from kvtier.tier.blobs.keys import Scope
from kvtier_sglang.radix.node import KvNode
from kvtier_sglang.refresh.prefetch import CompactedContext


def pruned_ranges(node: KvNode) -> list[PrunedRange]:
    """The ranges of the context up to `node` of which anchored heads keep a part, first to last."""
    found = []
    for one in node.path():
        begin, end = one.dropped
        kept = one.kept
        if 0 < kept < end - begin and one.num_slots < len(one.key):
            found.append(PrunedRange(one.start + begin, one.start + end, kept))
    return sorted(found, key=lambda pruned: pruned.begin)


def exact_stop(node: KvNode) -> int:
    """Up to which token the context of `node` was computed with nothing dropped."""
    return max((one.stop for one in node.path() if one.exact), default=0)


def compacted_context(
    node: KvNode, token_ids: Sequence[int], scope: Scope
) -> CompactedContext | None:
    """The context up to `node`, for a refresh; None where anchored heads keep all of it."""
    ranges = pruned_ranges(node)
    if not ranges:
        return None
    return CompactedContext(token_ids, ranges, exact_stop(node), scope)


__all__ = ["compacted_context", "exact_stop", "pruned_ranges"]

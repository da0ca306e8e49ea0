"""What a path of the tree is as one context: which ranges were pruned, and what is exact."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.retention.refreshing import PrunedRange
from kvtier.tier.blobs.keys import Scope
from kvtier_sglang.pool.allocator import HeadSplitAllocator
from kvtier_sglang.radix.node import KvNode
from kvtier_sglang.refresh.prefetch import CompactedContext


def pruned_ranges(node: KvNode) -> list[PrunedRange]:
    """The ranges of the context up to `node` of which CA heads keep a part, first to last."""
    found = []
    for one in node.path():
        begin, end = one.dropped
        kept = one.kept
        if 0 < kept < end - begin and one.ca_size < len(one.key):
            found.append(PrunedRange(one.start + begin, one.start + end, kept))
    return sorted(found, key=lambda pruned: pruned.begin)


def exact_stop(node: KvNode) -> int:
    """Up to which token the context of `node` was computed with nothing dropped."""
    return max((one.stop for one in node.path() if one.exact), default=0)


def compacted_context(
    node: KvNode, token_ids: Sequence[int], scope: Scope
) -> CompactedContext | None:
    """The context up to `node`, for a refresh; None where CA heads keep all of it."""
    ranges = pruned_ranges(node)
    if not ranges:
        return None
    return CompactedContext(token_ids, ranges, exact_stop(node), scope)


def outgrows(node: KvNode, allocator: HeadSplitAllocator) -> bool:
    """Whether a streaming session's kept turns leave no room to prefill the next one.

    Recomputing it folds its old answers into the context, which makes it small again.
    """
    streaming = allocator.streaming_tokens
    if streaming is None:
        return False
    held = sum(one.locality_size for one in node.path())
    return held > allocator.locality_size - 2 * streaming


__all__ = ["compacted_context", "exact_stop", "outgrows", "pruned_ranges"]

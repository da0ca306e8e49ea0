"""KV that came back, written into the pool as the nodes it was: recorded turns compressed just as
they were, whatever today's rule would choose, and what follows them as if it had been computed.

    landed     [ recorded node ][ recorded node ][ run of exact spans ]
    tree       anchor - node ---- node ---------- node

Scheduler thread only.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from kvtier.retention.locality import DroppedSpan
from kvtier.tier.lookup import Landed
from kvtier.tier.turns import NodeRecord
from kvtier_sglang.radix import KvtierRadixCache
from kvtier_sglang.spans import SpanCodec
from kvtier_sglang.variants import KvNode


class RestoringRadixCache(KvtierRadixCache):
    """A tree that takes KV back. codec: set once the pool is there."""

    codec: SpanCodec

    def restore(self, req: Any, anchor: KvNode, landed: Landed) -> KvNode | None:
        """Write what landed behind `anchor`; the deepest node of the restored path, or None where
        there is no room: what was written by then is a prefix like any other.

        Whatever is raised on the way, tree and slots are as they were before, but for what was
        evicted.
        """
        first_id = TreeNode.counter
        taken: list[torch.Tensor] = []
        try:
            return self._restore(req, anchor, landed, taken)
        except BaseException:
            self._take_back(first_id, taken)
            raise

    def _take_back(self, first_id: int, taken: list[torch.Tensor]) -> None:
        """Undo a restoring that stopped anywhere: nodes since `first_id`, in whatever state they
        are, and the CA slots that were `taken` for them."""
        parents = set()
        for node in [node for node in self.nodes() if node.id >= first_id]:
            self._detach(node)
            self.evictable_leaves.discard(node)
            parents.add(node.parent)
        if taken:
            self.allocator.reclaim(torch.cat(taken))
        self.recount()
        for parent in parents:
            if parent.id < first_id:
                self._update_leaf_status(parent)

    def _restore(
        self, req: Any, anchor: KvNode, landed: Landed, taken: list[torch.Tensor]
    ) -> KvNode | None:
        """See `restore`. The slots of new nodes are added to `taken`."""
        ids = req.full_untruncated_fill_ids[: landed.stop]
        key = RadixKey(ids, req.extra_key, cache_salt=req.cache_salt)
        node = anchor
        locks = []
        try:
            for place in landed.places:
                if place.start < anchor.stop:
                    continue
                part = key[node.stop : place.node.stop]
                child = self._write(node, part, place.node.prompt_stop, landed, taken)
                if child is None:
                    return None
                child.exact = node.exact and place.node.exact
                node = child
                if place.node.compressed:
                    self._compress_as(node, place.node)
                locks.append(self.lock(node))
            # The run behind them: what is exact of it, and what is not.
            for stop in (landed.exact_stop, landed.stop):
                if stop <= node.stop:
                    continue
                child = self._write(node, key[node.stop : stop], landed.stop, landed, taken)
                if child is None:
                    return None
                child.exact = node.exact and stop <= landed.exact_stop
                node = child
                locks.append(self.lock(node))
        finally:
            for lock in locks:
                self.unlock(lock)
        return node

    def _write(
        self,
        parent: KvNode,
        key: RadixKey,
        prompt_stop: int,
        landed: Landed,
        taken: list[torch.Tensor],
    ) -> KvNode | None:
        """A new node of the tokens `key` behind `parent` with what landed of them; None where there
        is no room. How it was computed the caller knows."""
        begin, stop = parent.stop, parent.stop + len(key)
        lock = self.lock(parent)
        try:
            self.allocator.evict_to_free_tokens(self, stop - begin)
            slots = self.allocator.alloc(stop - begin)
        finally:
            self.unlock(lock)
        if slots is None:
            return None
        taken.append(slots)
        for span, payload in zip(landed.host.spans, landed.host.payloads, strict=True):
            first, last = max(span.begin, begin), min(span.stop, stop)
            if first < last:
                part = slots[first - begin : last - begin]
                tokens = span.stop - span.begin
                self.codec.scatter(torch.from_numpy(payload), tokens, first - span.begin, part)
        return self._hang(parent, key, slots, 0, prompt_stop)

    def _compress_as(self, node: KvNode, record: NodeRecord) -> None:
        """Compress a restored node as it had been, whatever today's rule would choose."""
        node.compressed = True
        self.allocator.settle(node.value)
        span = DroppedSpan(*record.dropped)
        if span.num_tokens == 0:
            return
        self._drop(node, span)
        if record.kept < span.num_tokens and self.compaction is not None:
            self._keep(node, span, record.kept)
        self.counters["compressed_nodes"] += 1


def continues(landed: Landed, held: int) -> bool:
    """Whether what landed can be used behind `held` tokens of the device."""
    if not landed.begin <= held < landed.stop:
        return False
    recorded = max((place.node.stop for place in landed.places), default=0)
    starts = {place.start for place in landed.places}
    return held in starts or held >= recorded


__all__ = ["RestoringRadixCache", "continues"]

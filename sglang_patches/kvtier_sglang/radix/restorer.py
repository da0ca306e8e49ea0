"""KV that came back, written into the pool as the nodes it was: recorded turns compressed just as
they were, whatever today's rule would choose, and what follows them as if it had been computed.

    landed     [ recorded node ][ recorded node ][ run of exact spans ]
    tree       anchor - node ---- node ---------- node

Nodes and slots are the same on every tensor parallel rank, so a rank that cannot write what it has
builds them nonetheless; then the ranks tell each other, and all keep the path or none.

All of it runs in the scheduler's thread only.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from kvtier.tier.prefetch import Landed
from kvtier_sglang.compression.compressor import Compressor
from kvtier_sglang.radix.node import KvNode
from kvtier_sglang.radix.tree import VariantRadixTree
from kvtier_sglang.ranks import Ranks
from kvtier_sglang.tier.codec import SpanCodec

logger = logging.getLogger(__name__)


class Restorer:
    """The writer of what landed into one tree. ranks: those that write together."""

    def __init__(
        self, tree: VariantRadixTree, compressor: Compressor, codec: SpanCodec, ranks: Ranks
    ) -> None:
        self.tree = tree
        self.compressor = compressor
        self.codec = codec
        self.ranks = ranks
        self.counters: Counter[str] = Counter()
        # True once some of the path that is being restored could not be written.
        self._failed = False

    def restore(self, key: RadixKey, anchor: KvNode, landed: Landed) -> KvNode | None:
        """Write what landed of a key behind `anchor`. Return the deepest node of the restored path,
        or None where there is no room: what was written by then is a prefix like any other.

        It returns None, too, where something went wrong on any rank: what came from elsewhere must
        not end the scheduler, now and after every restart. Then tree and slots are as they were
        before, but for what was evicted.
        """
        first_id = TreeNode.counter
        taken: list[torch.Tensor] = []
        restored, self._failed = None, False
        try:
            restored = self._restore(key[: landed.stop], anchor, landed, taken)
        except Exception:
            logger.exception("what the tier had could not be restored; it is computed instead")
            self._failed = True
        failed = self.ranks.every(self._failed)
        if any(failed):
            self._take_back(first_id, taken)
            here = failed[self.ranks.rank]
            self.counters["restore_failed" if here else "restore_failed_on_another_rank"] += 1
            return None
        if restored is None:
            self.counters["no_room"] += 1
        return restored

    def _take_back(self, first_id: int, taken: list[torch.Tensor]) -> None:
        """Undo a restoring that stopped anywhere: nodes since `first_id`, in whatever state they
        are, and the slots that were `taken` for them."""
        self.tree.remove_since(first_id)
        if taken:
            self.tree.allocator.reclaim(torch.cat(taken))
        self.tree.recount()

    def _restore(
        self, key: RadixKey, anchor: KvNode, landed: Landed, taken: list[torch.Tensor]
    ) -> KvNode | None:
        """Write what landed, see `restore`, and add the slots of new nodes to `taken`."""
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
                    freed = self.compressor.as_recorded(node, place.node)
                    self.tree.shrink(node, freed)
                    self.tree.remember(node)
                locks.append(self.tree.lock(node))
            # The run behind them becomes two nodes: what is exact of it, and what is not.
            for stop in (landed.exact_stop, landed.stop):
                if stop <= node.stop:
                    continue
                child = self._write(node, key[node.stop : stop], landed.stop, landed, taken)
                if child is None:
                    return None
                child.exact = node.exact and stop <= landed.exact_stop
                node = child
                locks.append(self.tree.lock(node))
        finally:
            for lock in locks:
                self.tree.unlock(lock)
        return node

    def _write(
        self,
        parent: KvNode,
        key: RadixKey,
        prompt_stop: int,
        landed: Landed,
        taken: list[torch.Tensor],
    ) -> KvNode | None:
        """Write what landed of the tokens `key` into a new node behind `parent`, and return it;
        None where there is no room. The caller knows how exactly it was computed."""
        begin, stop = parent.stop, parent.stop + len(key)
        allocator = self.tree.allocator
        lock = self.tree.lock(parent)
        try:
            allocator.evict_to_free_tokens(self.tree, stop - begin)
            slots = allocator.alloc(stop - begin)
        finally:
            self.tree.unlock(lock)
        if slots is None:
            return None
        taken.append(slots)
        for span, payload in zip(landed.host.spans, landed.host.payloads, strict=True):
            first, last = max(span.begin, begin), min(span.stop, stop)
            if first < last:
                part = slots[first - begin : last - begin]
                self._scatter(payload, span.stop - span.begin, first - span.begin, part)
        child = self.tree.hang(parent, key, slots, 0, prompt_stop)
        child.restored_tokens = len(key)
        return child

    def _scatter(self, payload: Any, tokens: int, skipped: int, slots: torch.Tensor) -> None:
        """Write a part of a payload, see SpanCodec.scatter; remember a failure, for `restore`."""
        try:
            self.codec.scatter(torch.from_numpy(payload), tokens, skipped, slots)
        except Exception:
            if not self._failed:
                logger.exception("what the tier had could not be written; it is computed instead")
            self._failed = True


def continues(landed: Landed, held: int) -> bool:
    """Return whether what landed can be used behind `held` tokens of the device."""
    if not landed.begin <= held < landed.stop:
        return False
    recorded = max((place.node.stop for place in landed.places), default=0)
    starts = {place.start for place in landed.places}
    return held in starts or held >= recorded

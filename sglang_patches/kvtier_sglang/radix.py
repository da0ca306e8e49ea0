"""The radix tree whose nodes are compressed when their turn ends.

Every token of a node keeps its CA slot (`node.value`, as in SGLang's tree); what compression
takes away are locality slots, which the allocator finds through its CA -> locality map. So
matching, locking, eviction and SGLang's idle invariant see an ordinary tree.

When a request ends or is aborted, the nodes of its path that nobody else has locked drop the
span that `LocalityRule` names. Chunked prefill publishes a prompt as a chain of nodes; the
chain is one context, so it is merged into one node first.

    while prefilling   [chunk 0]-[chunk 1]-[chunk 2]                    exact
    turn ended         [ sink | compensation | recent | generated ]     one node

Where a share of the context was asked for, CA heads keep only their best tokens of that span
too (compaction.py), and the slots of the others go back to the pool.

How a tree with such nodes is matched, extended and accounted for is in variants.py.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvtier.retention.locality import DroppedSpan, LocalityRule
from kvtier.retention.share import Everything, Turn
from kvtier_sglang.compaction import Compaction
from kvtier_sglang.retention import Retention, mean_nll
from kvtier_sglang.variants import KvNode, VariantRadixCache


class KvtierRadixCache(VariantRadixCache):
    """The tree behind `--radix-cache-backend kvtier`.

    streaming:  locality heads drop what leaves their window already during prefill.
    retention:  how much of a context CA heads keep; compaction does it, None keeps everything.
    """

    def __init__(
        self,
        params: Any,
        rule: LocalityRule,
        *,
        streaming: bool = False,
        retention: Retention | None = None,
        compaction: Compaction | None = None,
    ) -> None:
        self.streaming = streaming
        self.retention = retention or Retention(Everything())
        self.compaction = compaction
        super().__init__(params, rule)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """See BasePrefixCache.match_prefix."""
        result = super().match_prefix(params)
        return self._empty_match_result if self._outgrown(result.last_device_node) else result

    def _outgrown(self, node: KvNode) -> bool:
        """Whether a streaming session's kept turns leave no room to prefill the next one.

        Recomputing it folds its old answers into the context, which makes it small again.
        """
        streaming = self.allocator.streaming_tokens
        if streaming is None:
            return False
        held = sum(n.locality_size for n in self._path(node))
        return held > self.allocator.locality_size - 2 * streaming

    def _computes_exactly(self, parent: KvNode) -> bool:
        return not self.streaming and super()._computes_exactly(parent)

    def checkpoint(self, req: Any, *, up_to: int) -> None:
        """Publish the request's KV up to `up_to`; see BasePrefixCache.checkpoint.

        Continues below the node the request has locked, never from the root: another variant of
        the same tokens must not be taken for the request's own prefix.
        """
        if self.disable:
            return
        key = RadixKey(
            req.full_untruncated_fill_ids[:up_to], req.extra_key, cache_salt=req.cache_salt
        )
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :up_to]
        owned = req.kv.cache_protected_len
        anchor = req.lock.node if req.lock is not None else self.root_node
        assert anchor is self.root_node or anchor.stop == owned, "lock and row disagree"
        # A compressed copy is no substitute for the exact KV this request still uses.
        node, matched = self._walk(anchor, key, owned, exact_only=True)
        # Tokens another request published meanwhile: use the tree's copy, free ours.
        duplicates = row[owned:matched].to(torch.int64, copy=True)
        slots = row.to(torch.int64, copy=True)
        node = self._append(node, key, matched, slots, req.priority or 0, len(req.origin_input_ids))
        if matched > owned:
            self._adopt_row(req, node, owned, matched)
            self.allocator.free_segment(duplicates, start_pos=owned)
        req.kv.cache_protected_len = up_to
        req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, up_to)
        self.unlock(req.lock)
        req.lock = self.lock(node)
        req.last_node = node
        if self.streaming and not req.finished():
            self._slide_window(node, up_to)

    def _adopt_row(self, req: Any, node: KvNode, begin: int, end: int) -> None:
        """Point the request's row [begin, end) at the tree's slots."""
        path = self.path_device_indices(node)
        self.req_to_token_pool.write((req.kv.req_pool_idx, slice(begin, end)), path[begin:end])

    def _slide_window(self, node: KvNode, up_to: int) -> None:
        """Streaming prefill: drop what has left the recent window of a running request.

        Only where the request is the sole user; otherwise the turn's end does it.
        """
        if node.compressed or node.lock_ref != 1:
            return
        self._merge_upwards(node)
        span = self.rule.dropped(node.start, up_to, min(up_to, node.prompt_stop))
        if span.num_tokens:
            self._drop(node, span)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """The turn ended or was aborted: compress what nobody else uses of the request's path.

        Not when it was retracted: it will be back for its exact KV.
        """
        if self.disable or not (checkpointed or req.finished()):
            return
        node = req.last_node
        while node is not self.root_node:
            parent = node.parent
            if not node.compressed and node.lock_ref == 0:
                node = self._merge_upwards(node)
                parent = node.parent
                self._compress(node)
                self._drop_twin(node)
            node = parent

    def _drop_twin(self, node: KvNode) -> None:
        """Keep one of two compressed copies of the same tokens that are worth the same: an earlier
        request could not use the older one, say because it wanted the prompt's log-probabilities.

        Nobody has `node` locked, so nobody has its children locked; they move to the older copy.
        """
        siblings = node.parent.siblings[node.key.child_key()]
        twins = (n for n in siblings if n is not node and _same_tokens(n, node))
        twin = next((n for n in twins if n.compressed and n.exact == node.exact), None)
        if twin is None:
            return
        children = list(node.children.values())
        for child in children:
            self._detach(child)
            child.parent = twin
            self._attach(twin, child)
        self._update_leaf_status(twin)
        self.allocator.free(node.value)
        self._delete_leaf(node)
        self.kv_events.record_remove(node)
        for child in children:
            self._drop_twin(child)

    def _merge_upwards(self, node: KvNode) -> KvNode:
        """Merge `node` with the chain of ancestors that chunked prefill cut it from.

        The deepest node survives, because a running request holds its lock on that one.
        """
        parent = node.parent
        while (
            parent is not self.root_node
            and not parent.compressed
            and not parent.branch_point
            and parent.lock_ref == node.lock_ref
            and len(parent.children) == 1
            and (self.streaming or parent.exact == node.exact)
        ):
            self._detach(node)
            self._detach(parent)
            node.key = _joined(parent.key, node.key)
            node.value = torch.cat((parent.value, node.value))
            node.start, node.parent = parent.start, parent.parent
            node.dropped, node.exact = parent.dropped, parent.exact and node.exact
            node.locality_size += parent.locality_size
            node.ca_size += parent.ca_size
            node.hit_count = max(node.hit_count, parent.hit_count)
            node.priority = max(node.priority, parent.priority)
            self._attach(node.parent, node)
            parent = node.parent
        return node

    def _compress(self, node: KvNode) -> None:
        """Apply the locality rule to a node that nobody has locked."""
        node.compressed = True
        self.allocator.settle(node.value)
        span = self.rule.dropped(node.start, node.stop, node.prompt_stop)
        if span.num_tokens:
            self._drop(node, span)
            self._compact(node, span)
            self.counters["compressed_nodes"] += 1

    def _compact(self, node: KvNode, span: DroppedSpan) -> None:
        """Let CA heads keep the share of an unlocked node that the retention rule allows."""
        if self.compaction is None:
            return
        prompt_stop = min(node.prompt_stop, node.stop)
        asked = self.allocator.pool.nll[node.value[: prompt_stop - node.start]]
        turn = Turn(
            prompt_tokens=prompt_stop - node.start,
            droppable_tokens=span.num_tokens,
            held_tokens=sum(n.ca_size for n in self._path(node.parent)),
            nll=mean_nll(asked) if self.retention.rule.needs_nll else None,
        )
        keep = self.retention.keep(turn)
        if keep < span.num_tokens:
            self._keep(node, span, keep)

    def _keep(self, node: KvNode, span: DroppedSpan, keep: int) -> None:
        """Let CA heads keep their best `keep` entries of a dropped span, and free the others."""
        assert self.compaction is not None, "nothing scored what to keep"
        slots = node.value[span.begin : span.end]
        self.compaction.compact(slots, node.start + span.begin, keep)
        node.value[span.begin : span.end] = self.allocator.compact(slots, keep)
        freed = span.num_tokens - keep
        node.ca_size -= freed
        self.evictable_size_ -= freed
        self.counters["compacted_tokens"] += freed

    def _drop(self, node: KvNode, span: DroppedSpan) -> None:
        freed = self.allocator.drop(
            node.value[span.begin : span.end], compensation=self.rule.compensation
        )
        node.dropped = span
        node.locality_size -= freed
        self.counters["dropped_tokens"] += freed
        if node.lock_ref == 0:
            self.locality_evictable_size_ -= freed
        else:
            self.locality_protected_size_ -= freed


def _same_tokens(a: KvNode, b: KvNode) -> bool:
    return len(a.key) == len(b.key) and a.key.match(b.key) == len(a.key)


def _joined(a: RadixKey, b: RadixKey) -> RadixKey:
    return RadixKey(a.raw_token_ids() + b.raw_token_ids(), a.extra_key, cache_salt=a.cache_salt)

"""The radix tree whose nodes are compressed when their turn ends.

Every token of a node keeps its CA slot (`node.value`, as in SGLang's tree); what compression
takes away are locality slots, which the allocator finds through its CA -> locality map. So
matching, locking, eviction and SGLang's idle invariant see an ordinary tree, and this class
adds three things:

Compression. When a request ends or is aborted, the nodes of its path that nobody else has locked
drop the span that `LocalityRule` names. Chunked prefill publishes a prompt as a chain of nodes; the
chain is one context, so it is merged into one node first.

    while prefilling   [chunk 0]-[chunk 1]-[chunk 2]          exact
    turn ended         [ sink | compensation | recent | generated ]     one node

Atomic nodes. A compressed node cannot be cut inside its dropped span: a request that leaves it
there matches to the node's start and recomputes. The recomputed tokens are exact where the
compressed ones are not, so they become a *variant*: a second child that starts with the same
token. `siblings` lists the variants of a first token; matching takes the one that reaches
furthest. The point where the request left is remembered as a node boundary of the variant, so
the next request that leaves there shares it.

Second accounting. `locality_evictable_size` counts the locality slots of unlocked nodes, for
admission; SGLang's own counters keep counting CA slots.

Not thread-safe; owned by the scheduler thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    DecLockRefResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode
from sglang.srt.mem_cache.registry import TreeCacheBuildContext

from kvtier.config import Settings
from kvtier.retention.locality import DroppedSpan, LocalityRule
from kvtier_sglang.allocator import HeadSplitAllocator

_NOTHING = DroppedSpan(0, 0)


class KvNode(TreeNode):
    """A tree node that knows what its locality heads still hold.

    start:          position of the node's first token in its context.
    prompt_stop:    position where the prompt of its turn ended; later tokens were generated.
    compressed:     its turn ended and its locality KV is what the rule keeps.
    dropped:        offsets of the span replaced by the compensation entry.
    branch_point:   a request left at the node's end; never merged with its child.
    locality_size:  locality slots the node holds.
    """

    def __init__(self, priority: int = 0) -> None:
        super().__init__(priority=priority)
        # SGLang's node invents children on lookup; ours must not.
        self.children: dict[Any, KvNode] = {}
        self.siblings: dict[Any, list[KvNode]] = {}
        self.start = 0
        self.prompt_stop = 0
        self.compressed = False
        self.dropped = _NOTHING
        self.branch_point = False
        self.locality_size = 0

    @property
    def stop(self) -> int:
        return self.start + len(self.key)


class KvtierRadixCache(RadixCache):
    """SGLang's radix cache over a `HeadSplitAllocator`, one page per token."""

    root_node: KvNode
    _empty_match_result: MatchResult

    def __init__(self, params: Any, rule: LocalityRule, *, streaming: bool = False) -> None:
        self.rule = rule
        self.streaming = streaming
        self.counters = {"compressed_nodes": 0, "dropped_tokens": 0, "variants": 0}
        super().__init__(params)
        self.allocator.owner_check = self.check_integrity
        assert self.page_size == 1, "kvtier keeps one token per page"
        assert not self.is_eagle, "speculative decoding is refused at start-up"

    @property
    def allocator(self) -> HeadSplitAllocator:
        return self.token_to_kv_pool_allocator

    def reset(self) -> None:
        super().reset()
        root = KvNode(priority=self.root_node.priority)
        root.key, root.value = self.root_node.key, self.root_node.value
        root.lock_ref, root.hash_value = 1, []
        root.compressed = True
        self.root_node = root
        self._empty_match_result = self._empty_match_result._replace(
            last_device_node=root, last_host_node=root, best_match_node=root
        )
        self.locality_evictable_size_ = 0
        self.locality_protected_size_ = 0

    def locality_evictable_size(self) -> int:
        return self.locality_evictable_size_

    # -- matching --

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        key, _ = params.key.maybe_to_bigram_view(self.is_eagle)
        if self.disable or len(key) == 0:
            return self._empty_match_result
        node, length = self._walk(self.root_node, key, 0)
        if length == 0 or self._outgrown(node):
            return self._empty_match_result
        return MatchResult(
            device_prefix_len=length,
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
        )

    def _outgrown(self, node: KvNode) -> bool:
        """Whether a streaming session's kept turns leave no room to prefill the next one.

        Recomputing it folds its old answers into the context, which makes it small again.
        """
        streaming = self.allocator.streaming_tokens
        if streaming is None:
            return False
        held = sum(n.locality_size for n in self._path(node))
        return held > self.allocator.locality_size - 2 * streaming

    def touch_prefix(self, key: RadixKey) -> None:
        """See BasePrefixCache: keep what waiting requests will match from being evicted."""
        if self.disable:
            return
        node, offset, now = self.root_node, 0, time.monotonic()
        while offset < len(key):
            best, usable = self._furthest_child(node, key, offset, exact_only=False)
            if best is None:
                return
            best.last_access_time = now
            offset += usable
            if usable < len(best.key):
                return
            node = best

    def _walk(
        self, node: KvNode, key: RadixKey, offset: int, *, exact_only: bool = False
    ) -> tuple[KvNode, int]:
        """Follow `key` from `offset` as far as its nodes allow, splitting the last node if it is
        left inside. `exact_only` does not enter dropped spans. Returns the last node and the
        position reached."""
        now = time.monotonic()
        node.last_access_time = now
        while offset < len(key):
            best, usable = self._furthest_child(node, key, offset, exact_only)
            if best is None:
                break
            best.last_access_time = now
            offset += usable
            if usable < len(best.key):
                node = self._split_node(best.key, best, usable)
                node.branch_point = True
                break
            node = best
        return node, offset

    def _furthest_child(
        self, node: KvNode, key: RadixKey, offset: int, exact_only: bool
    ) -> tuple[KvNode | None, int]:
        """The child that shares most with key[offset:] without tearing a compressed node."""
        best, reach = None, 0
        for child in node.siblings.get(key.child_key_at(offset), ()):
            usable = self._usable(child, child.key.match_at(key, offset))
            if exact_only and child.dropped.num_tokens:
                usable = min(usable, child.dropped.begin)
            if usable > reach:
                best, reach = child, usable
        return best, reach

    def _usable(self, node: KvNode, matched: int) -> int:
        """How many of `matched` leading tokens of a node can be used as a prefix."""
        if matched == len(node.key) or self.rule.can_split(node.dropped, matched):
            return matched
        # Behind the span but too close: no. Inside or before it: up to where the span begins.
        return min(matched, node.dropped.begin)

    def path_device_indices(self, node: KvNode) -> torch.Tensor:
        values = [n.value for n in self._path(node)]
        return torch.cat(values[::-1]) if values else self._empty_device_indices

    def _path(self, node: KvNode) -> Iterator[KvNode]:
        """From `node` up to, not including, the root."""
        while node is not self.root_node:
            yield node
            node = node.parent

    # -- inserting --

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert a whole key from the root. The engine inserts through `checkpoint`."""
        if self.disable:
            return InsertResult(prefix_len=0)
        value = params.value
        assert value is not None, "kvtier inserts need slots"
        node, matched = self._walk(self.root_node, params.key, 0)
        node = self._append(node, params.key, matched, value, params.priority or 0, len(params.key))
        return InsertResult(prefix_len=matched, last_device_node=node)

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

    def _append(
        self,
        node: KvNode,
        key: RadixKey,
        matched: int,
        slots: torch.Tensor,
        priority: int,
        prompt_stop: int,
    ) -> KvNode:
        """Hang key[matched:] below `node` and return the deepest node of the key."""
        for ancestor in self._path(node):
            ancestor.priority = max(ancestor.priority, priority)
        if matched == len(key):
            return node
        boundaries = self._learned_boundaries(node, key, matched)
        for begin, end in zip([matched, *boundaries], [*boundaries, len(key)], strict=True):
            child = KvNode(priority=priority)
            child.parent, child.start, child.prompt_stop = node, begin, prompt_stop
            child.key, child.value = key[begin:end], slots[begin:end].clone()
            child.branch_point = end in boundaries
            child.hit_count = 1
            self._attach(node, child)
            child.locality_size = self._count_locality(child)
            self.evictable_size_ += len(child.key)
            self.locality_evictable_size_ += child.locality_size
            self._update_leaf_status(node)
            self._update_leaf_status(child)
            self.kv_events.record_store(child)
            node = child
        return node

    def _learned_boundaries(self, node: KvNode, key: RadixKey, offset: int) -> list[int]:
        """Where key[offset:] leaves the compressed nodes it could not use: there a variant is
        cut, so that the next request with the same prefix can share it."""
        ends = {
            offset + child.key.match_at(key, offset)
            for child in node.siblings.get(key.child_key_at(offset), ())
        }
        if ends:
            self.counters["variants"] += 1
        return sorted(end for end in ends if offset < end < len(key))

    def _count_locality(self, node: KvNode) -> int:
        return int((self.allocator.locality_of[node.value] > 0).sum())

    def _attach(self, parent: KvNode, child: KvNode) -> None:
        first = child.key.child_key()
        variants = parent.siblings.setdefault(first, [])
        variants.append(child)
        parent.children[(first, child.id)] = child

    def _detach(self, child: KvNode) -> None:
        first = child.key.child_key()
        variants = child.parent.siblings[first]
        variants.remove(child)
        if not variants:
            del child.parent.siblings[first]
        del child.parent.children[(first, child.id)]

    def _split_node(self, key: RadixKey, child: KvNode, split_len: int) -> KvNode:
        """Cut `child` at an offset its dropped span allows; the upper part is a new node."""
        assert self.rule.can_split(child.dropped, split_len), "a dropped span is atomic"
        upper = KvNode(priority=child.priority)
        parent = child.parent
        self._detach(child)
        upper.parent, upper.start, upper.prompt_stop = parent, child.start, child.prompt_stop
        upper.lock_ref, upper.hit_count = child.lock_ref, child.hit_count
        upper.last_access_time = child.last_access_time
        upper.compressed = child.compressed
        upper.key, upper.value = child.key[:split_len], child.value[:split_len].clone()
        child.parent, child.start = upper, child.start + split_len
        child.key, child.value = child.key[split_len:], child.value[split_len:].clone()
        if child.dropped.num_tokens:
            if split_len <= child.dropped.begin:
                begin, end = child.dropped
                child.dropped = DroppedSpan(begin - split_len, end - split_len)
            else:
                upper.dropped, child.dropped = child.dropped, _NOTHING
        upper.locality_size = self._count_locality(upper)
        child.locality_size -= upper.locality_size
        self._attach(parent, upper)
        self._attach(upper, child)
        self._update_leaf_status(upper)
        return upper

    # -- compressing --

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
        """Keep one of two compressed copies of the same tokens: an earlier request could not use
        the older one, say because it wanted the prompt's log-probabilities.

        Nobody has `node` locked, so nobody has its children locked; they move to the older copy.
        """
        siblings = node.parent.siblings[node.key.child_key()]
        twin = next((n for n in siblings if n is not node and _same_tokens(n, node)), None)
        if twin is None or not twin.compressed:
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
        ):
            self._detach(node)
            self._detach(parent)
            node.key = _joined(parent.key, node.key)
            node.value = torch.cat((parent.value, node.value))
            node.start, node.parent = parent.start, parent.parent
            node.dropped = parent.dropped
            node.locality_size += parent.locality_size
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
            self.counters["compressed_nodes"] += 1

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

    # -- accounting of the second pool --

    def inc_lock_ref(self, node: KvNode) -> IncLockRefResult:
        if not self.disable:
            for n in self._path(node):
                if n.lock_ref == 0:
                    self.locality_evictable_size_ -= n.locality_size
                    self.locality_protected_size_ += n.locality_size
        return super().inc_lock_ref(node)

    def dec_lock_ref(
        self, node: KvNode, params: DecLockRefParams | None = None
    ) -> DecLockRefResult:
        if not self.disable:
            for n in self._path(node):
                if n.lock_ref == 1:
                    self.locality_evictable_size_ += n.locality_size
                    self.locality_protected_size_ -= n.locality_size
        return super().dec_lock_ref(node, params)

    def _delete_leaf(self, node: KvNode) -> None:
        self._detach(node)
        self.evictable_size_ -= len(node.key)
        self.locality_evictable_size_ -= node.locality_size
        self.evictable_leaves.discard(node)
        self._update_leaf_status(node.parent)

    def nodes(self) -> Iterator[KvNode]:
        """Every node but the root."""
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> list[str]:
        """Violations of the tree's invariants; empty when healthy."""
        problems = list(self.allocator.check_integrity())
        evictable = locality_evictable = locality_protected = 0
        for node in self.nodes():
            if node.locality_size != self._count_locality(node):
                problems.append(f"node {node.id} miscounts its locality slots")
            if node.start != (0 if node.parent is self.root_node else node.parent.stop):
                problems.append(f"node {node.id} does not continue its parent")
            if len(node.value) != len(node.key):
                problems.append(f"node {node.id} has {len(node.value)} slots")
            if node.lock_ref == 0:
                evictable += len(node.key)
                locality_evictable += node.locality_size
            else:
                locality_protected += node.locality_size
        for name, counted, kept in (
            ("evictable", evictable, self.evictable_size_),
            ("locality evictable", locality_evictable, self.locality_evictable_size_),
            ("locality protected", locality_protected, self.locality_protected_size_),
        ):
            if counted != kept:
                problems.append(f"{name} size is {kept}, the nodes hold {counted}")
        return problems

    def pretty_print(self) -> None:
        for node in sorted(self.nodes(), key=lambda n: n.start):
            state = "compressed" if node.compressed else "exact"
            print(
                f"[{node.start}, {node.stop}) {state} locality={node.locality_size} "
                f"locks={node.lock_ref} id={node.id}"
            )


def _same_tokens(a: KvNode, b: KvNode) -> bool:
    return len(a.key) == len(b.key) and a.key.match(b.key) == len(a.key)


def _joined(a: RadixKey, b: RadixKey) -> RadixKey:
    return RadixKey(a.raw_token_ids() + b.raw_token_ids(), a.extra_key, cache_salt=a.cache_salt)


def build(ctx: TreeCacheBuildContext, settings: Settings) -> KvtierRadixCache:
    """The factory behind `--radix-cache-backend kvtier`."""
    rule = LocalityRule(
        sink_tokens=settings.sink_tokens,
        recent_tokens=settings.recent_tokens,
        branch_recent_tokens=settings.branch_recent_tokens,
        compensation=settings.compensation,
    )
    return KvtierRadixCache(ctx.params, rule, streaming=settings.prefill == "streaming")

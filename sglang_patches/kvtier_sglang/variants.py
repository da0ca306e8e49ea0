"""A radix tree with atomic nodes, and with variants of them.

A compressed node cannot be cut inside its dropped span: a request that leaves it there matches
to the span's beginning and recomputes the rest. The recomputed tokens are exact where the
compressed ones are not, so they become a *variant*: a second child that starts with the same
token. `siblings` lists the variants of a first token; matching takes the one that reaches
furthest.

    parent ─┬─ [ sink |  dropped  | recent | answer ]      compressed, atomic
            └─ [ the same tokens, exact ]─[ another end ]  variant, cut where it left the first

The point where the request left is remembered as a node boundary of the variant, so the next
request that leaves there shares it.

The tree keeps a second account beside SGLang's, which counts CA slots:
`locality_evictable_size` counts the locality slots of unlocked nodes, for admission.

Not thread-safe; owned by the scheduler thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
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

from kvtier.retention.locality import DroppedSpan, LocalityRule
from kvtier_sglang.allocator import HeadSplitAllocator

NOTHING_DROPPED = DroppedSpan(0, 0)


class KvNode(TreeNode):
    """A tree node that knows what its locality heads still hold.

    start:          position of the node's first token in its context.
    prompt_stop:    position where the prompt of its turn ended; later tokens were generated.
    compressed:     its turn ended and its locality KV is what the rule keeps.
    dropped:        offsets of the span replaced by the compensation entry.
    branch_point:   a request left at the node's end; never merged with its child.
    locality_size:  locality slots the node holds.
    ca_size:        CA slots the node holds: its tokens, less what compaction freed. The value of
                    a token without one is 0, SGLang's padding slot.
    exact:          its KV was computed with nothing before it dropped.
    """

    def __init__(self, priority: int = 0) -> None:
        super().__init__(priority=priority)
        # SGLang's node invents children on lookup; ours must not.
        self.children: dict[Any, KvNode] = {}
        self.siblings: dict[Any, list[KvNode]] = {}
        self.start = 0
        self.prompt_stop = 0
        self.compressed = False
        self.dropped = NOTHING_DROPPED
        self.branch_point = False
        self.locality_size = 0
        self.ca_size = 0
        self.exact = True

    @property
    def stop(self) -> int:
        return self.start + len(self.key)


@dataclass
class _Sizes:
    """Slots of a tree's nodes, of both classes, unlocked (evictable) and locked (protected)."""

    evictable: int = 0
    protected: int = 0
    locality_evictable: int = 0
    locality_protected: int = 0


def wants_prompt_logprobs(req: Any) -> bool:
    """Whether a request asks for log-probabilities of its prompt. req: None for a match that is of
    no request."""
    if req is None or not req.return_logprob:
        return False
    return 0 <= req.logprob_start_len < len(req.origin_input_ids)


def recomputed_tokens(req: Any) -> int:
    """Tokens of a request's prompt that are cached and computed again all the same: the cached ones
    were compressed, or computed behind such, and its log-probabilities want exact ones."""
    return getattr(req, "kvtier_recomputed_tokens", 0)


class VariantRadixCache(RadixCache):
    """SGLang's radix cache over a `HeadSplitAllocator`, one page per token; see the module."""

    root_node: KvNode
    _empty_match_result: MatchResult

    def __init__(self, params: Any, rule: LocalityRule) -> None:
        self.rule = rule
        self.counters = {
            "compressed_nodes": 0,
            "dropped_tokens": 0,
            "variants": 0,
            "compacted_tokens": 0,
        }
        super().__init__(params)
        # CA slots that running requests have beside those of their nodes.
        self.private_ca = 0
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

    def hold_private(self, slots: int) -> None:
        """A running request got (or, below zero, gave back) CA slots beside those of its nodes."""
        self.private_ca += slots
        self.protected_size_ += slots

    # -- matching --

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        key, _ = params.key.maybe_to_bigram_view(self.is_eagle)
        if self.disable or len(key) == 0:
            return self._empty_match_result
        # The log-probabilities of a prompt are a measurement of the model: what they are computed
        # behind must be as if nothing had ever been dropped.
        exact_only = wants_prompt_logprobs(params.req)
        node, length = self._walk(self.root_node, key, 0, exact_only=exact_only)
        if exact_only:
            self._note_recomputed(params.req, self._cached_length(key) - length)
        if length == 0:
            return self._empty_match_result
        return MatchResult(
            device_prefix_len=length,
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
        )

    def _cached_length(self, key: RadixKey) -> int:
        """How many leading tokens of `key` are cached in whatever state, usable or not."""
        longest, ends = 0, [(self.root_node, 0)]
        while ends:
            node, offset = ends.pop()
            if offset == len(key):
                break
            for child in node.siblings.get(key.child_key_at(offset), ()):
                matched = child.key.match_at(key, offset)
                longest = max(longest, offset + matched)
                if matched == len(child.key):
                    ends.append((child, offset + matched))
        return longest

    def _note_recomputed(self, req: Any, tokens: int) -> None:
        """Remember what `recomputed_tokens` is to say. As with SGLang's count of cached tokens, a
        request that has begun to compute is not looked at again: it would find its own KV."""
        if not (req.already_computed or req.retracted_stain):
            req.kvtier_recomputed_tokens = tokens

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
        left inside. `exact_only` enters neither dropped spans nor KV that is worse than what would
        be computed there. Returns the last node and the
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
        """The child that shares most with key[offset:] without tearing a compressed node; of equal
        ones one that is exact."""
        best, reach = None, 0
        for child in node.siblings.get(key.child_key_at(offset), ()):
            usable = self._usable(child, child.key.match_at(key, offset))
            if exact_only and child.dropped.num_tokens:
                usable = min(usable, child.dropped.begin)
            if exact_only and self._computes_exactly(node) and not child.exact:
                # A restored copy, computed behind what another request had dropped.
                usable = 0
            better = usable == reach and best is not None and child.exact > best.exact
            if usable > reach or better:
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
        """SGLang inserts through `checkpoint`; a whole key from the root could not tell which
        variant a request has been reading."""
        raise RuntimeError("the kvtier tree is extended by checkpoint, never by insert")

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
            node = self._hang(node, key[begin:end], slots[begin:end].clone(), priority, prompt_stop)
            node.branch_point = end in boundaries
        return node

    def _hang(
        self,
        parent: KvNode,
        key: RadixKey,
        value: torch.Tensor,
        priority: int,
        prompt_stop: int,
    ) -> KvNode:
        """A new unlocked child of `parent` that owns the slots `value`, one for each token."""
        child = KvNode(priority=priority)
        child.parent, child.start, child.prompt_stop = parent, parent.stop, prompt_stop
        child.key, child.value = key, value
        child.exact = self._computes_exactly(parent)
        child.hit_count = 1
        self._attach(parent, child)
        child.locality_size = self._count_locality(child)
        child.ca_size = len(child.key)
        self.evictable_size_ += child.ca_size
        self.locality_evictable_size_ += child.locality_size
        self._update_leaf_status(parent)
        self._update_leaf_status(child)
        self.kv_events.record_store(child)
        return child

    def _computes_exactly(self, parent: KvNode) -> bool:
        """Whether what is computed behind a node is exact."""
        return parent.exact and not any(n.dropped.num_tokens for n in self._path(parent))

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
        upper.compressed, upper.exact = child.compressed, child.exact
        upper.key, upper.value = child.key[:split_len], child.value[:split_len].clone()
        child.parent, child.start = upper, child.start + split_len
        child.key, child.value = child.key[split_len:], child.value[split_len:].clone()
        if child.dropped.num_tokens:
            if split_len <= child.dropped.begin:
                begin, end = child.dropped
                child.dropped = DroppedSpan(begin - split_len, end - split_len)
            else:
                upper.dropped, child.dropped = child.dropped, NOTHING_DROPPED
        upper.locality_size = self._count_locality(upper)
        child.locality_size -= upper.locality_size
        upper.ca_size = int(torch.count_nonzero(upper.value))
        child.ca_size -= upper.ca_size
        self._attach(parent, upper)
        self._attach(upper, child)
        self._update_leaf_status(upper)
        return upper

    # -- accounting: what is held, not how long the keys are --

    def inc_lock_ref(self, node: KvNode) -> IncLockRefResult:
        if self.disable:
            return IncLockRefResult(delta=0)
        before = self.evictable_size_
        for n in self._path(node):
            if n.lock_ref == 0:
                self._protect(n, 1)
            n.lock_ref += 1
            self._update_leaf_status(n)
        return IncLockRefResult(delta=self.evictable_size_ - before)

    def dec_lock_ref(
        self, node: KvNode, params: DecLockRefParams | None = None
    ) -> DecLockRefResult:
        if self.disable:
            return DecLockRefResult(delta=0)
        before = self.evictable_size_
        for n in self._path(node):
            if n.lock_ref == 1:
                self._protect(n, -1)
            n.lock_ref -= 1
            self._update_leaf_status(n)
        return DecLockRefResult(delta=self.evictable_size_ - before)

    def _protect(self, node: KvNode, sign: int) -> None:
        """Move a node's slots from evictable to protected (1) or back (-1)."""
        self.evictable_size_ -= sign * node.ca_size
        self.protected_size_ += sign * node.ca_size
        self.locality_evictable_size_ -= sign * node.locality_size
        self.locality_protected_size_ += sign * node.locality_size

    def _delete_leaf(self, node: KvNode) -> None:
        self._detach(node)
        self.evictable_size_ -= node.ca_size
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

    def _held(self) -> _Sizes:
        """What the nodes hold, counted from what they say of themselves."""
        sizes = _Sizes()
        for node in self.nodes():
            if node.lock_ref == 0:
                sizes.evictable += node.ca_size
                sizes.locality_evictable += node.locality_size
            else:
                sizes.protected += node.ca_size
                sizes.locality_protected += node.locality_size
        sizes.protected += self.private_ca
        return sizes

    def recount(self) -> None:
        """Make the tree's accounts those of its nodes, after something went wrong halfway."""
        held = self._held()
        self.evictable_size_, self.protected_size_ = held.evictable, held.protected
        self.locality_evictable_size_ = held.locality_evictable
        self.locality_protected_size_ = held.locality_protected

    def check_integrity(self) -> list[str]:
        """Violations of the tree's invariants; empty when healthy."""
        problems = list(self.allocator.check_integrity())
        for node in self.nodes():
            if node.locality_size != self._count_locality(node):
                problems.append(f"node {node.id} miscounts its locality slots")
            if node.start != (0 if node.parent is self.root_node else node.parent.stop):
                problems.append(f"node {node.id} does not continue its parent")
            if len(node.value) != len(node.key):
                problems.append(f"node {node.id} has {len(node.value)} slots")
            if node.ca_size != int(torch.count_nonzero(node.value)):
                problems.append(f"node {node.id} miscounts its CA slots")
        held = self._held()
        for name, counted, kept in (
            ("evictable", held.evictable, self.evictable_size_),
            ("protected", held.protected, self.protected_size_),
            ("locality evictable", held.locality_evictable, self.locality_evictable_size_),
            ("locality protected", held.locality_protected, self.locality_protected_size_),
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

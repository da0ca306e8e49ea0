"""A radix tree with nodes that are compressed, and with variants of them.

A request that leaves a compressed node inside its dropped span has not all of the newest tokens
before that place. So the span is cut a window before it, and the window is computed again over what
heads keep of the span's beginning, which both then share (while others read the node, its beginning
is copied). The window's tokens become a *variant*: a second child that starts with the same token.
`siblings` lists the variants of a first token; matching takes the one that reaches furthest.

    parent ─ [ sink | dropped ─┬─ dropped | recent | answer ]   compressed, cut
                               └─ [ window ]─[ another end ]    variant

The point where the request left is remembered as a node boundary of the variant, so the next
request that leaves there computes nothing of it again. A span that cannot be cut (its entries stand
for several tokens each, or its beginning is short) is left where it begins.

The tree is not thread-safe; the scheduler's thread owns it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    DecLockRefResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from kvtier.retention.locality import DroppedSpan, LocalityRule
from kvtier_sglang.pool.allocator import BundleAllocator
from kvtier_sglang.pool.packed import PackedSpan, PackedSpans, Part
from kvtier_sglang.pool.turning import KeyTurner
from kvtier_sglang.radix.index import TokenIndex
from kvtier_sglang.radix.matching import Matching, branch_points
from kvtier_sglang.radix.misses import DROPPED, EVICTED, Misses
from kvtier_sglang.radix.node import KvNode, descendants, moved_tokens, same_tokens
from kvtier_sglang.ranks import Ranks


class VariantRadixTree(RadixCache):
    """SGLang's radix cache over a `BundleAllocator`, one page per token; see the module docstring.

    rule: says where a compressed node may be cut.
    """

    root_node: KvNode
    _empty_match_result: MatchResult

    def __init__(self, params: Any, rule: LocalityRule, ranks: Ranks) -> None:
        self.ranks = ranks
        self.matching = Matching(rule, self._has_tokens)
        self.counters: Counter[str] = Counter(variants=0)
        # The places where tokens of compressed nodes stand; None where nobody asks.
        self.index: TokenIndex | None = None
        # The places where those of evicted ones stood that a tier may have; None likewise.
        self.evicted: TokenIndex | None = None
        self.misses = Misses()
        # The reason for which nodes go now.
        self._going = EVICTED
        super().__init__(params)
        # The slots that running requests have beside those of their nodes.
        self.private_slots = 0
        self.allocator.owner_check = self.check_integrity
        assert self.page_size == 1, "kvtier keeps one token per page"
        assert not self.is_eagle, "speculative decoding is refused at start-up"

    @property
    def allocator(self) -> BundleAllocator:
        return self.token_to_kv_pool_allocator

    def reset(self) -> None:
        super().reset()
        root = KvNode(priority=self.root_node.priority)
        root.key, root.value = self.root_node.key, self.root_node.value
        root.lock_ref, root.hash_value = 1, []
        root.compressed = True
        self.root_node = root
        for known in (self.index, self.evicted):
            if known is not None:
                known.clear()
        self._empty_match_result = self._empty_match_result._replace(
            last_device_node=root, last_host_node=root, best_match_node=root
        )

    def hold_private(self, slots: int) -> None:
        """Account slots that a running request got (or, below zero, gave back) beside those of its
        nodes."""
        self.private_slots += slots
        self.protected_size_ += slots

    def insert(self, params: InsertParams) -> InsertResult:
        """Raise RuntimeError: SGLang inserts through `checkpoint`. A whole key from the root could
        not tell which variant a request has been reading."""
        raise RuntimeError("the kvtier tree is extended by checkpoint, never by insert")

    # -- matching --

    def walk(
        self, node: KvNode, key: RadixKey, offset: int, *, exact_only: bool = False
    ) -> tuple[KvNode, int]:
        """Follow `key` from `offset` as far as its nodes allow, splitting the last node if it is
        left inside. `exact_only` enters neither dropped spans nor KV that is worse than what would
        be computed there. Returns the last node and the position reached."""
        node.last_access_time = time.monotonic()
        if self.matching.rule.window and not exact_only:
            key = key[: self._before_window(node, key, offset)]
        for child, usable in self._steps(node, key, offset, exact_only=exact_only):
            if usable == len(child.key):
                node = child
            else:
                begin, end = child.dropped
                beginning = None
                if begin < usable < end:
                    if child.lock_ref:
                        beginning = self._copy_beginning(child, usable)
                    if beginning is None and (child.lock_ref or not self._cut_span(child, usable)):
                        usable = begin
                if not usable:
                    break
                node = beginning or self._split_node(child.key, child, usable)
                node.branch_point = True
            offset += usable
        return node, offset

    def _before_window(self, node: KvNode, key: RadixKey, offset: int) -> int:
        """Return the position up to which a key is looked for where some layers have a window: a
        token before the end of what is compressed, where less than half a window is there behind
        it. Then the span is cut a window earlier, and the last tokens of the window that is
        computed again are nearly as they were."""
        stop, gap = offset, 0
        path = [(one, len(one.key)) for one in reversed(list(node.path()))]
        for one, usable in (*path, *self._steps(node, key, offset, exact_only=False)):
            begin, end = one.dropped
            if begin < usable < end:
                return len(key)
            if begin < end <= usable:
                gap = one.start + end
            stop = one.start + usable
        is_little = gap > 0 and 2 * (stop - gap) < self.matching.rule.window
        return max(offset, gap - 1) if is_little else len(key)

    def touch_prefix(self, key: RadixKey) -> None:
        """Keep what waiting requests will match from being evicted; see BasePrefixCache."""
        if not self.disable:
            for _ in self._steps(self.root_node, key, 0, exact_only=False):
                pass

    def _steps(
        self, node: KvNode, key: RadixKey, offset: int, *, exact_only: bool
    ) -> Iterator[tuple[KvNode, int]]:
        """Yield the nodes that `key` goes through, with how many of their tokens can be used: all
        of them, but for the last node. They count as used now."""
        now = time.monotonic()
        while offset < len(key):
            child, usable = self.matching.furthest_child(node, key, offset, exact_only=exact_only)
            if child is None:
                return
            child.last_access_time = now
            left_inside = usable < len(child.key)
            yield child, usable
            if left_inside:
                return
            node, offset = child, offset + usable

    def path_device_indices(self, node: KvNode) -> torch.Tensor:
        values = [n.value for n in node.path()]
        return torch.cat(values[::-1]) if values else self._empty_device_indices

    # -- growing --

    def append(
        self,
        node: KvNode,
        key: RadixKey,
        matched: int,
        slots: torch.Tensor,
        priority: int,
        prompt_stop: int,
    ) -> KvNode:
        """Hang key[matched:] below `node` and return the deepest node of the key."""
        for ancestor in node.path():
            ancestor.priority = max(ancestor.priority, priority)
        if matched == len(key):
            return node
        boundaries = self._learned_boundaries(node, key, matched)
        for begin, end in zip([matched, *boundaries], [*boundaries, len(key)], strict=True):
            node = self.hang(node, key[begin:end], slots[begin:end].clone(), priority, prompt_stop)
            node.branch_point = end in boundaries
        return node

    def hang(
        self,
        parent: KvNode,
        key: RadixKey,
        value: torch.Tensor,
        priority: int,
        prompt_stop: int,
    ) -> KvNode:
        """Hang a new unlocked child below `parent`, which owns the slots `value`, one for each
        token, and return it."""
        child = KvNode(priority=priority)
        child.start, child.prompt_stop = parent.stop, prompt_stop
        child.key, child.value = key, value
        child.exact = not parent.is_behind_a_drop
        parent.attach(child)
        child.num_slots = len(child.key)
        self.evictable_size_ += child.num_slots
        self._update_leaf_status(parent)
        self._update_leaf_status(child)
        self.kv_events.record_store(child)
        return child

    def _learned_boundaries(self, node: KvNode, key: RadixKey, offset: int) -> list[int]:
        """Return where key[offset:] leaves the compressed nodes it could not use: there a variant
        is cut, so that the next request with the same prefix can share it."""
        ends = branch_points(node, key, offset)
        if ends:
            self.counters["variants"] += 1
        return sorted(end for end in ends if offset < end < len(key))

    # -- cutting and joining --

    def _has_tokens(self, node: KvNode) -> bool:
        """Return whether what is kept of a node's dropped span is known token by token."""
        packed = self.allocator.pool.packed
        if packed is None:
            return False
        span = packed.of(node.value[node.dropped.begin :])
        return span is not None and span.tokens is not None

    def _packed(self, node: KvNode) -> tuple[PackedSpans, PackedSpan]:
        """Return the pool's packed spans, and the one that is kept of a node's dropped span."""
        packed = self.allocator.pool.packed
        assert packed is not None, "a dropped span in a pool that does not pack"
        span = packed.of(node.value[node.dropped.begin :])
        assert span is not None, "a dropped span that is not packed"
        return packed, span

    def _make_free(self, slots: int) -> bool:
        """Evict what is needed for so many free slots. Return False where all that may go is too
        little. Nothing goes then, as a request that waits asks in every round."""
        if slots > self.allocator.available_size() + self.evictable_size_:
            return False
        return self.allocator.evict_to_free_tokens(self, slots) is not False

    def _cut_span(self, node: KvNode, at: int) -> bool:
        """Cut what is kept of a node's dropped span at this offset, so that the node can be split
        there. Return False where the parts would not fit, or there is no room."""
        begin, end = node.dropped
        packed, span = self._packed(node)
        first, rest = (Part.of(span, 0, at - begin), Part.of(span, at - begin, end - begin))
        # The ranks' heads keep different numbers, and all ranks the same slots.
        every = self.ranks.every((first.slots, rest.slots))
        above, below = (max(slots) for slots in zip(*every, strict=True))
        if not 0 < above <= min(at - begin, span.slots.numel()) or not 0 < below <= end - at:
            return False
        lock = self.lock(node)
        slots = self.allocator.alloc_bundles(below) if self._make_free(below) else None
        self.unlock(lock)
        if slots is None:
            return False
        left = packed.cut(span, first, rest, span.slots[:above].clone(), slots)
        for part, place in ((span.slots[:above], slice(begin, at)), (slots, slice(at, end))):
            node.value[place] = 0
            node.value[place][: part.numel()] = part
        self.allocator.free(left)
        self.shrink(node, left.numel() - slots.numel())
        self.counters["cut_spans"] += 1
        return True

    def _copy_beginning(self, node: KvNode, at: int) -> KvNode | None:
        """Copy what is kept of a node up to this offset, inside its dropped span: while requests
        read the node it stays as it is. Returns the copy, a variant beside it; None where there is
        no room."""
        value = self.copied(node, 0, at)
        if value is None:
            return None
        copy = node.beginning(at, value)
        copy.dropped, copy.choice = DroppedSpan(node.dropped.begin, at), node.choice
        copy.sync_kept(self.allocator.pool.held_entries)
        node.parent.attach(copy)
        self.remember(copy)
        self.evictable_size_ += copy.num_slots
        self._update_leaf_status(copy)
        self.counters["copied_beginnings"] += 1
        return copy

    def copied(
        self, node: KvNode, begin: int, stop: int, turner: KeyTurner | None = None, shift: int = 0
    ) -> torch.Tensor | None:
        """Copy what is kept of a node's tokens between these offsets, whoever reads it. turner:
        turns the copies' keys to positions that are `shift` further on; None: they stay as they
        are. Returns the copies' slots, one for each token as in `value`; None where they would not
        fit, or there is no room."""
        first, last = (min(max(at, begin), stop) for at in node.dropped)
        part = packed = span = None
        bundles = 0
        if last > first:
            packed, span = self._packed(node)
            part = Part.of(span, first - node.dropped.begin, last - node.dropped.begin)
            bundles = max(self.ranks.every(part.slots))
            if not 0 < bundles <= last - first:
                return None
        dense = torch.cat((node.value[begin:first], node.value[last:stop]))
        lock = self.lock(node)
        slots = exact = None
        if self._make_free(bundles + dense.numel()):
            slots = self.allocator.alloc_bundles(bundles) if bundles else dense[:0]
            exact = None if slots is None else self.allocator.alloc(dense.numel())
        self.unlock(lock)
        if slots is None or exact is None:
            if slots is not None:
                self.allocator.free(slots)
            return None
        self.allocator.pool.move_kv_cache(exact, dense)
        turned = None
        if turner is not None and shift:
            turner.slots(exact, shift)
            turned = partial(turner.entries, shift=shift)
        if packed is not None and span is not None and part is not None:
            packed.copy(span, part, slots, turned)
        value = torch.zeros_like(node.value[begin:stop])
        value[: first - begin], value[last - begin :] = exact.split([first - begin, stop - last])
        value[first - begin : first - begin + bundles] = slots
        return value

    def _split_node(self, key: RadixKey, child: KvNode, split_len: int) -> KvNode:
        """Cut `child` at an offset, and return the upper part, a new node. An offset inside its
        dropped span needs `_cut_span` there first."""
        parent = child.parent
        self.forget(child)
        child.detach()
        upper = child.cut(split_len, self.allocator.pool.held_entries)
        parent.attach(upper)
        upper.attach(child)
        self._update_leaf_status(upper)
        for node in (upper, child):
            self.remember(node)
        return upper

    def split(self, node: KvNode, at: int) -> KvNode:
        """Cut a node that nothing is dropped of, and return the upper part."""
        return self._split_node(node.key, node, at)

    def remember(self, node: KvNode) -> None:
        """Let what is kept of a node be found by its tokens, if it is compressed."""
        if self.index is not None and node.compressed and node.num_slots:
            self.index.add(node)

    def forget(self, node: KvNode) -> None:
        """Let a node be found no more."""
        if self.index is not None:
            self.index.remove(node)

    def merge_upwards(self, node: KvNode) -> KvNode:
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
            and parent.exact == node.exact
        ):
            node.detach()
            parent.detach()
            node.prepend(parent)
            parent.parent.attach(node)
            parent = node.parent
        return node

    def remove_duplicate(self, node: KvNode) -> None:
        """Keep one of two compressed copies of the same tokens that are worth the same: an earlier
        request could not use the older one, say because it wanted the prompt's log-probabilities.

        No request has `node` locked, so none has its children locked; they move to the older copy.
        """
        siblings = node.parent.siblings[node.key.child_key()]
        copies = (n for n in siblings if n is not node and same_tokens(n, node))
        older = next((n for n in copies if n.compressed and n.like(node)), None)
        if older is None:
            return
        older.hit_count += node.hit_count
        older.priority = max(older.priority, node.priority)
        older.last_access_time = max(older.last_access_time, node.last_access_time)
        older.account = node.account or older.account
        children = list(node.children.values())
        for child in children:
            child.detach()
            older.attach(child)
        self._update_leaf_status(older)
        self.remove_leaf(node)
        for child in children:
            self.remove_duplicate(child)

    def remove_leaf(self, node: KvNode) -> None:
        """Free a node that nobody uses and that has no children."""
        # It does not count as evicted: nobody shall look for it in a tier.
        self.forget(node)
        if node.num_slots:
            self.allocator.free(node.value)
        self._going = DROPPED
        self._delete_leaf(node)
        self._going = EVICTED
        self.kv_events.record_remove(node)

    # -- accounting: what is held, not how long the keys are --

    def inc_lock_ref(self, node: KvNode) -> IncLockRefResult:
        return IncLockRefResult(delta=self._count_locks(node, 1))

    def dec_lock_ref(
        self, node: KvNode, params: DecLockRefParams | None = None
    ) -> DecLockRefResult:
        return DecLockRefResult(delta=self._count_locks(node, -1))

    def _count_locks(self, node: KvNode, by: int) -> int:
        """Count a lock of a path that was taken (1) or is given back (-1). Return by how much the
        evictable slots grew."""
        if self.disable:
            return 0
        before = self.evictable_size_
        for n in node.path():
            # The first lock protects a node's slots, and the last one gives them free.
            if n.lock_ref == (0 if by > 0 else 1):
                self.evictable_size_ -= by * n.num_slots
                self.protected_size_ += by * n.num_slots
            n.lock_ref += by
            self._update_leaf_status(n)
        return self.evictable_size_ - before

    def shrink(self, node: KvNode, slots: int) -> None:
        """Account so many slots that a node gave back."""
        node.num_slots -= slots
        if node.lock_ref == 0:
            self.evictable_size_ -= slots
        else:
            self.protected_size_ -= slots

    def _delete_leaf(self, node: KvNode) -> None:
        was_known = self.index is not None and node in self.index
        if was_known and self.evicted is not None and not moved_tokens(node):
            self.evicted.add(node)
        self.misses.gone.add(node, self._going)
        self.forget(node)
        node.detach()
        self.evictable_size_ -= node.num_slots
        self.evictable_leaves.discard(node)
        self._update_leaf_status(node.parent)

    def nodes(self) -> Iterator[KvNode]:
        """Return every node but the root."""
        return descendants(self.root_node)

    def remove_since(self, first_id: int) -> None:
        """Take nodes with this id and later ones out of the tree, whatever state they are in. The
        caller sees to their slots and to the accounts (`recount`)."""
        removed = [node for node in self.nodes() if node.id >= first_id]
        for node in removed:
            self.forget(node)
            node.detach()
            self.evictable_leaves.discard(node)
        for parent in {node.parent for node in removed if node.parent.id < first_id}:
            self._update_leaf_status(parent)

    def recount(self) -> None:
        """Make the tree's accounts those of its nodes, after something went wrong halfway."""
        self.evictable_size_, self.protected_size_ = self._held()

    def check_integrity(self) -> list[str]:
        """Return the violations of the tree's invariants; empty when healthy."""
        problems = [*self.allocator.check_integrity(), *_wrong_nodes(self.nodes())]
        sizes = {"evictable": self.evictable_size_, "protected": self.protected_size_}
        for (name, believed), held in zip(sizes.items(), self._held(), strict=True):
            if held != believed:
                problems.append(f"{name} size is {believed}, the nodes hold {held}")
        return problems

    def _held(self) -> tuple[int, int]:
        """Count anew the slots of unlocked (evictable) nodes, and those of locked (protected) ones
        and of running requests."""
        held = [0, self.private_slots]
        for node in self.nodes():
            held[node.lock_ref != 0] += node.num_slots
        return held[0], held[1]

    def pretty_print(self) -> None:
        """Print the nodes, as SGLang asks before it gives up for want of memory."""
        for node in sorted(self.nodes(), key=lambda n: n.start):
            print(f"[{node.start}, {node.stop}) slots={node.num_slots} locks={node.lock_ref}")


def _wrong_nodes(nodes: Iterable[KvNode]) -> Iterator[str]:
    """Yield the violations of what nodes say of themselves."""
    for node in nodes:
        if node.start != (0 if node.parent.parent is None else node.parent.stop):
            yield f"node {node.id} does not continue its parent"
        if len(node.value) != len(node.key):
            yield f"node {node.id} has {len(node.value)} slots"
        if node.num_slots != int(torch.count_nonzero(node.value)):
            yield f"node {node.id} miscounts its slots"

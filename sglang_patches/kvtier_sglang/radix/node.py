"""A node of the tree: some tokens of a context, and what the pool still holds of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from kvtier.retention.locality import DroppedSpan
from kvtier.retention.refreshing import PrunedRange
from kvtier.retention.shares import Choice
from kvtier.tier.blobs.turns import NodeRecord
from kvtier_sglang.pool.packed import slots_as_entries

NOTHING_DROPPED = DroppedSpan(0, 0)
# So many of a node's children are followed; more of them say the same of what is before them.
MOST_FOLLOWED = 4


class KvNode(TreeNode):
    """A tree node that knows what is left of it.

    start:          position of the node's first token in its context.
    prompt_stop:    position where the prompt of its turn ended; later tokens were generated.
    compressed:     its turn ended and its KV is what the rule keeps.
    dropped:        offsets of the span of which heads keep a part.
    branch_point:   a request left at the node's end; never merged with its child.
    num_slots:      slots the node holds: its tokens, less what compression freed. The value of
                    a token without one is 0, SGLang's padding slot.
    exact:          its KV was computed with nothing before it dropped.
    moved:          its KV was computed behind other tokens, and its keys turned to where it stands.
    turns:          times that what it holds was turned, or coded again, since it was computed.
    choice:         the part of the dropped span that anchored heads keep, and why; None where
                    nothing is dropped, or they keep all.
    kept_entries:   entries of the dropped span that an anchored head keeps, or a head on average;
                    None likewise.
    sent_tokens:    tokens whose exact KV was handed over for the tier.
    restored_tokens: tokens whose KV came from the tier.
    session:        session of the request that computed it, see misses.py; None while that runs.
    account:        account of the request that ended here last, likewise; None where none did.
    prefix_hash:    hash of all tokens up to its end, see gone.py; None until it is asked for.
    """

    # These are of SGLang's node, which has no types.
    key: RadixKey
    value: torch.Tensor
    parent: Any
    lock_ref: int
    hit_count: int
    priority: int
    last_access_time: float

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
        self.num_slots = 0
        self.exact = True
        self.moved = False
        self.turns = 0
        self.choice: Choice | None = None
        self.kept_entries: int | None = None
        self.sent_tokens = self.restored_tokens = 0
        self.session: str | None = None
        self.account: Any = None
        self.prefix_hash: int | None = None

    @property
    def stop(self) -> int:
        return self.start + len(self.key)

    def path(self) -> Iterator[KvNode]:
        """Yield the nodes from this one up to, not including, the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    @property
    def is_behind_a_drop(self) -> bool:
        """Return whether what is computed behind this node sees KV that is not exact."""
        return not self.exact or any(node.dropped.num_tokens for node in self.path())

    def first_tokens_behind(self, most: int) -> list[list[int]]:
        """Return at most so many tokens behind this node, for each of its first MOST_FOLLOWED
        children: the child's own, and then those of the first child of each node."""
        found = []
        for child in list(self.children.values())[:MOST_FOLLOWED]:
            tokens: list[int] = []
            node: KvNode | None = child
            while node is not None and len(tokens) < most:
                tokens += node.key.token_ids[: most - len(tokens)]
                node = next(iter(node.children.values()), None)
            found.append(tokens)
        return found

    def like(self, other: KvNode) -> bool:
        """Return whether both were computed as exactly."""
        return (self.exact, self.moved) == (other.exact, other.moved)

    @property
    def kept(self) -> int:
        """The number of entries that an anchored head keeps of the dropped span."""
        return self.dropped.num_tokens if self.kept_entries is None else self.kept_entries

    @property
    def entries(self) -> int:
        """The number of entries that an anchored head keeps of the node; 0 where a memory stands
        for its tokens."""
        return len(self.key) - self.dropped.num_tokens + self.kept if self.num_slots else 0

    def attach(self, child: KvNode) -> None:
        first = child.key.child_key()
        self.siblings.setdefault(first, []).append(child)
        self.children[(first, child.id)] = child
        child.parent = self

    def detach(self) -> None:
        """Take this node out of its parent's children; it still names its parent."""
        first = self.key.child_key()
        variants = self.parent.siblings[first]
        variants.remove(self)
        if not variants:
            del self.parent.siblings[first]
        del self.parent.children[(first, self.id)]

    def cut(self, at: int, entries: Callable[[int], int]) -> KvNode:
        """Return a new node that takes this one's first `at` tokens, and has no place in the tree
        yet. entries: says how many kept entries so many slots hold."""
        upper = self.beginning(at, self.value[:at].clone())
        upper.lock_ref, upper.hit_count = self.lock_ref, self.hit_count
        upper.last_access_time, upper.creation_time = self.last_access_time, self.creation_time
        self.start += at
        self.key, self.value = self.key[at:], self.value[at:].clone()
        begin, end = self.dropped
        if self.dropped.num_tokens and at <= begin:
            self.dropped = DroppedSpan(begin - at, end - at)
        elif begin < at < end:
            upper.dropped, self.dropped = DroppedSpan(begin, at), DroppedSpan(0, end - at)
            upper.choice = self.choice
            for part in (upper, self):
                part.sync_kept(entries)
        elif self.dropped.num_tokens:
            upper.dropped, self.dropped = self.dropped, NOTHING_DROPPED
            upper.choice, self.choice = self.choice, None
            upper.kept_entries, self.kept_entries = self.kept_entries, None
        self.sent_tokens -= upper.sent_tokens
        self.restored_tokens -= upper.restored_tokens
        self.num_slots -= upper.num_slots
        return upper

    def beginning(self, at: int, value: torch.Tensor) -> KvNode:
        """Return a new node of this one's first `at` tokens in these slots. Its dropped span is
        empty."""
        upper = KvNode(priority=self.priority)
        upper.start, upper.prompt_stop = self.start, self.prompt_stop
        upper.compressed = self.compressed
        upper.exact, upper.moved, upper.turns = self.exact, self.moved, self.turns
        upper.key, upper.value = self.key[:at], value
        upper.num_slots = int(torch.count_nonzero(value))
        upper.sent_tokens = min(self.sent_tokens, at)
        upper.restored_tokens = min(self.restored_tokens, at)
        upper.session = self.session
        return upper

    def sync_kept(self, entries: Callable[[int], int]) -> None:
        """Count what is kept of the dropped span by the slots that it has; entries: see `cut`."""
        held = self.value[self.dropped.begin : self.dropped.end]
        room = entries(int(torch.count_nonzero(held)))
        self.kept_entries = min(room, self.dropped.num_tokens)

    def prepend(self, upper: KvNode) -> None:
        """Take over the tokens of the node that this one continues, where neither is compressed and
        both are as exact."""
        self.key = joined(upper.key, self.key)
        self.value = torch.cat((upper.value, self.value))
        self.start = upper.start
        self.sent_tokens += upper.sent_tokens
        self.restored_tokens += upper.restored_tokens
        self.num_slots += upper.num_slots
        self.hit_count = max(self.hit_count, upper.hit_count)
        self.priority = max(self.priority, upper.priority)

    def pruned_ranges(self, *, is_coded: bool) -> list[PrunedRange]:
        """Return the ranges of the context up to this node's end of which anchored heads keep a
        part, first to last. A range whose coded entries would not fit it uncoded is left out."""
        found = []
        for one in self.path():
            begin, end = one.dropped
            kept = one.kept
            needed = slots_as_entries(kept) if is_coded else kept
            if 0 < kept < end - begin >= needed and one.num_slots < len(one.key):
                found.append(PrunedRange(one.start + begin, one.start + end, kept))
        return found[::-1]

    def note_used(self, counted: int) -> None:
        """Note that a request computed or used the KV up to this node's end; its first `counted`
        tokens were counted before. Eviction policies go by this, as they do over SGLang's own tree.
        """
        now = time.monotonic()
        for node in self.path():
            node.last_access_time = now
            node.hit_count += node.stop > counted

    def note_sent(self, tokens: int) -> None:
        """Note that the exact KV of the newest `tokens` tokens up to this node's end was handed
        over for the tier."""
        for node in self.path():
            part = min(tokens, len(node.key))
            if not part:
                return
            node.sent_tokens = max(node.sent_tokens, part)
            tokens -= part

    def record(self) -> NodeRecord:
        """Return the record that a tier stores of the node, so that it can be compressed again just
        as it is."""
        return NodeRecord(
            stop=self.stop,
            prompt_stop=self.prompt_stop,
            compressed=self.compressed,
            dropped=(self.dropped.begin, self.dropped.end),
            kept=self.kept,
            exact=self.exact,
        )


def descendants(node: KvNode) -> Iterator[KvNode]:
    stack = list(node.children.values())
    while stack:
        one = stack.pop()
        yield one
        stack.extend(one.children.values())


def same_tokens(a: KvNode, b: KvNode) -> bool:
    return len(a.key) == len(b.key) and a.key.match(b.key) == len(a.key)


def moved_tokens(node: KvNode) -> int:
    """Return the number of tokens up to a node's end that were computed behind other ones."""
    return sum(len(one.key) for one in node.path() if one.moved)


def joined(a: RadixKey, b: RadixKey) -> RadixKey:
    return RadixKey(a.raw_token_ids() + b.raw_token_ids(), a.extra_key, cache_salt=a.cache_salt)

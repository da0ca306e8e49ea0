"""The prefixes that memories stand for, as nodes of the tree.

    root ─┬─ [ prefix ]─[ ... ]                          computed exactly
          └─ "m" + digest: [ prefix, no slots ]─[ ... ]  behind the memory: compressed, atomic

Such a node holds nothing. It is there so that positions and lengths are those of the context, and
is made again whenever a request wants it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvtier.memory.storage import PrefixMemory
from kvtier.retention.locality import DroppedSpan
from kvtier_sglang.memory.bank import MemoryBank
from kvtier_sglang.radix.node import KvNode
from kvtier_sglang.radix.tree import VariantRadixTree
from kvtier_sglang.tier.scopes import memory_in


class Start(NamedTuple):
    """The place that a key is looked up from. node: the last one that is known to match; offset:
    the number of the key's tokens up to there; exact_only: see VariantRadixTree.walk; memory: the
    one that stands for what is before, None for none."""

    node: KvNode
    offset: int
    exact_only: bool
    memory: PrefixMemory | None = None

    def walk(
        self, tree: VariantRadixTree, key: RadixKey, *, exact_only: bool
    ) -> tuple[KvNode, int]:
        """Walk a key from here; see VariantRadixTree.walk."""
        exact_only = exact_only or self.exact_only
        return tree.walk(self.node, key, self.offset, exact_only=exact_only)


def begin(tree: VariantRadixTree, bank: MemoryBank | None, key: RadixKey) -> Start:
    """Return the place behind the prefix of a request's memory, or the root.

    A memory may be dropped while the request waits. Then the request is computed exactly: it stands
    where the memory's other requests do, but enters nothing of theirs that is not exact.
    """
    digest = None if bank is None else memory_in(key.extra_key)
    memory = None if bank is None or digest is None else bank.named(digest)
    if memory is None:
        return Start(tree.root_node, 0, exact_only=digest is not None)
    length = len(memory.prefix_ids)
    for child in tree.root_node.siblings.get(key.child_key_at(0), ()):
        if len(child.key) == length and child.dropped.num_tokens == length:
            return Start(child, length, exact_only=False, memory=memory)
    return Start(_hang(tree, key[:length]), length, exact_only=False, memory=memory)


def _hang(tree: VariantRadixTree, key: RadixKey) -> KvNode:
    """Hang a node that stands for a prefix and holds nothing of it below the root."""
    node = KvNode()
    node.key, node.value = key, torch.zeros(len(key), dtype=torch.int64, device=tree.device)
    node.prompt_stop, node.dropped = len(key), DroppedSpan(0, len(key))
    node.compressed, node.exact = True, False
    tree.root_node.attach(node)
    tree._update_leaf_status(node)
    return node


__all__ = ["Start", "begin"]

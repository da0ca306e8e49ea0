"""Prefixes that memories stand for, as nodes of the tree.

    root ─┬─ [ prefix ]─[ ... ]                          computed exactly
          └─ "m" + digest: [ prefix, no slots ]─[ ... ]  behind the memory: compressed, atomic

Such a node holds nothing. It is there so that positions and lengths are those of the context, and
is made again whenever a request wants it.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvtier.retention.locality import DroppedSpan
from kvtier_sglang.memory.bank import MemoryBank
from kvtier_sglang.radix.node import KvNode
from kvtier_sglang.radix.tree import VariantRadixTree
from kvtier_sglang.tier.scopes import memory_in


def begin(
    tree: VariantRadixTree, bank: MemoryBank | None, key: RadixKey, req: Any
) -> tuple[KvNode, int]:
    """Where in the tree a request's key is looked up from: behind its memory's prefix, or at the
    root. The bank learns which it is. req: None for a match that is of no request."""
    if bank is None:
        return tree.root_node, 0
    digest = memory_in(key.extra_key)
    if req is not None:
        bank.answer(req.rid, digest)
    if digest is None:
        return tree.root_node, 0
    memory = bank.named(digest)
    assert memory is not None, "a memory is held as long as requests are there"
    length = len(memory.prefix_ids)
    for child in tree.root_node.siblings.get(key.child_key_at(0), ()):
        if len(child.key) == length and child.dropped.num_tokens == length:
            return child, length
    return _hang(tree, key[:length]), length


def _hang(tree: VariantRadixTree, key: RadixKey) -> KvNode:
    """A node that holds nothing of a prefix."""
    node = KvNode()
    node.key, node.value = key, torch.zeros(len(key), dtype=torch.int64, device=tree.device)
    node.prompt_stop, node.dropped = len(key), DroppedSpan(0, len(key))
    node.compressed, node.exact, node.hit_count = True, False, 1
    tree.root_node.attach(node)
    tree._update_leaf_status(node)
    return node


__all__ = ["begin"]

"""The prefixes that memories stand for, as nodes of the tree.

    root ─┬─ [ prefix ]─[ ... ]                          computed exactly
          └─ "m" + digest: [ prefix, no slots ]─[ ... ]  behind the memory: compressed, atomic

Such a node holds nothing. It is there so that positions and lengths are those of the context, and
is made again whenever a request wants it.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvtier.memory.storage import PrefixMemory
from kvtier.retention.locality import DroppedSpan
from kvtier_sglang.memory.bank import MemoryBank
from kvtier_sglang.radix.node import KvNode
from kvtier_sglang.radix.tree import VariantRadixTree
from kvtier_sglang.tier.scopes import memory_in


def begin(
    tree: VariantRadixTree, bank: MemoryBank | None, key: RadixKey
) -> tuple[KvNode, bool, PrefixMemory | None]:
    """Return the node that a request's key is looked up behind: that of the prefix of its memory,
    or the root; whether it may then enter exact KV only; and the memory.

    A memory may be dropped while the request waits. Then the request is computed exactly: it stands
    where the memory's other requests do, but enters nothing of theirs that is not exact.
    """
    digest = None if bank is None else memory_in(key.extra_key)
    memory = None if bank is None or digest is None else bank.named(digest)
    if memory is None:
        return tree.root_node, digest is not None, None
    length = len(memory.prefix_ids)
    for child in tree.root_node.siblings.get(key.child_key_at(0), ()):
        if len(child.key) == length and child.dropped.num_tokens == length:
            return child, False, memory
    return _hang(tree, key[:length]), False, memory


def _hang(tree: VariantRadixTree, key: RadixKey) -> KvNode:
    """Hang a node that stands for a prefix and holds nothing of it below the root."""
    node = KvNode()
    node.key, node.value = key, torch.zeros(len(key), dtype=torch.int64, device=tree.device)
    node.prompt_stop, node.dropped = len(key), DroppedSpan(0, len(key))
    node.compressed, node.exact = True, False
    tree.root_node.attach(node)
    tree._update_leaf_status(node)
    return node

"""What becomes of a path's nodes when their turn ends."""

from __future__ import annotations

from kvtier_sglang.compression.compressor import Compressor
from kvtier_sglang.radix.node import KvNode
from kvtier_sglang.radix.tree import VariantRadixTree


def compress_path(tree: VariantRadixTree, compressor: Compressor, node: KvNode) -> None:
    """Compress what no request has locked of the path to `node`: each turn as one node."""
    while node is not tree.root_node:
        parent = node.parent
        if not node.compressed and node.lock_ref == 0:
            node = tree.merge_upwards(node)
            parent = node.parent
            held = (one.entries for one in parent.path())
            tree.shrink(node, compressor.end_turn(node, held))
            tree.remove_duplicate(node)
        node = parent


def remove_path(tree: VariantRadixTree, node: KvNode, begin: int) -> None:
    """Take the path to `node` out of the tree, down to position `begin`, as far as nothing else
    stands on it or uses it."""
    while node is not tree.root_node and node.start >= begin:
        if node.lock_ref or node.children:
            return
        parent = node.parent
        tree.remove_leaf(node)
        node = parent


__all__ = ["compress_path", "remove_path"]

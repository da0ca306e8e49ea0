"""What becomes of a path's nodes when their turn ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvtier_sglang.compression.compressor import Compressor
from kvtier_sglang.radix.node import KvNode
from kvtier_sglang.radix.tree import VariantRadixTree


def compress_node(
    tree: VariantRadixTree, node: KvNode, end: Callable[[KvNode, Iterable[int]], int]
) -> KvNode:
    """Compress a node as one with those before it that chunks cut it from; the node that is left.
    end: a compressor's way to do so."""
    node = tree.merge_upwards(node)
    held = (one.entries for one in node.parent.path())
    tree.shrink(node, end(node, held))
    tree.remember(node)
    return node


def compress_path(tree: VariantRadixTree, compressor: Compressor, node: KvNode) -> None:
    """Compress what no request has locked of the path to `node`: each turn as one node."""
    while node is not tree.root_node:
        parent = node.parent
        if not node.compressed and node.lock_ref == 0:
            node = compress_node(tree, node, compressor.end_turn)
            parent = node.parent
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


__all__ = ["compress_node", "compress_path", "remove_path"]

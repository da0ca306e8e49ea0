"""The compression, or removal, of a path's nodes when their turn ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from kvtier.retention.locality import LEAST_PART
from kvtier_sglang.compression.compressor import Compressor
from kvtier_sglang.radix.node import KvNode
from kvtier_sglang.radix.tree import VariantRadixTree

# Counts what is to be evicted first. Its times of last use are before all of the clock's and never
# equal, as ranks would order equal ones each in its own way.
_evicted_first = itertools.count()


def compress_node(
    tree: VariantRadixTree, node: KvNode, end: Callable[[KvNode, Iterable[int]], int]
) -> KvNode:
    """Compress a node as one with those before it that chunks cut it from, and return the node that
    is left. end: the compressor's method that does so."""
    node = tree.merge_upwards(node)
    held = (one.entries for one in node.parent.path())
    tree.shrink(node, end(node, held))
    tree.remember(node)
    return node


def compress_path(tree: VariantRadixTree, compressor: Compressor, node: KvNode) -> None:
    """Compress what no request has locked of the path to `node`: each turn as one node. Where some
    layers have a window, the last window of the newest prompt, and its answer, stay as they are."""
    window = compressor.rule.window
    end = compressor.end_part if window else compressor.end_turn
    stop = max(0, min(node.prompt_stop, node.stop) - window)
    while node is not tree.root_node:
        if not node.compressed and node.lock_ref == 0:
            part = _before(tree, node, stop) if window else node
            if part is not None:
                node = compress_node(tree, part, end)
                parent = node.parent
                tree.remove_duplicate(node)
                node = parent
                continue
        node = node.parent


def _before(tree: VariantRadixTree, node: KvNode, stop: int) -> KvNode | None:
    """Return the part of a node before a position, as a node of its own; None where that is too
    little yet, or others leave at the node's end, which need the window before it."""
    node = tree.merge_upwards(node)
    if node.branch_point or len(node.children) > 1:
        return None
    if node.stop <= stop:
        return node
    tokens = stop - node.start
    return tree.split(node, tokens) if tokens >= LEAST_PART else None


def evict_first(node: KvNode, session: str | None = None) -> None:
    """Have the context that ends with this node evicted before any other. Nodes stay that are
    locked, that other contexts go through, or that another session computed, where one is named."""
    time_s = 1e-6 * next(_evicted_first)
    for below, one in enumerate(node.path()):
        # The last one has no child, and of those above each has the one below.
        if one.lock_ref or len(one.children) > min(below, 1):
            return
        if session is not None and one.session != session:
            return
        one.last_access_time = time_s


def remove_path(tree: VariantRadixTree, node: KvNode, begin: int) -> None:
    """Take the path to `node` out of the tree, down to position `begin`, as far as nothing else
    stands on it or uses it."""
    while node is not tree.root_node and node.start >= begin:
        if node.lock_ref or node.children:
            return
        parent = node.parent
        tree.remove_leaf(node)
        node = parent

"""The choice of the child that a key continues in, where children of a node may start with the same
token and may not be cut everywhere. It reads nodes and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.mem_cache.radix_cache import RadixKey

from kvtier.retention.locality import (
    CUT_WINDOW,
    LEAST_CUT,
    SMALL_SHARE,
    WIDE_CUT_WINDOW,
    LocalityRule,
)
from kvtier_sglang.radix.node import KvNode


@dataclass(frozen=True)
class Matching:
    """The matching of keys with nodes. rule: says where a compressed node may be cut. has_tokens:
    says whether what is kept of a node's dropped span can be cut, too."""

    rule: LocalityRule
    has_tokens: Callable[[KvNode], bool]

    def furthest_child(
        self, node: KvNode, key: RadixKey, offset: int, *, exact_only: bool
    ) -> tuple[KvNode | None, int]:
        """Return the child that shares most with key[offset:] without tearing a compressed node,
        and how many tokens. Of equal children it prefers one that is exact, then one that was not
        moved, then one that need not be cut."""
        best, reach = None, 0
        for child in node.siblings.get(key.child_key_at(offset), ()):
            usable = self._usable(child, child.key.match_at(key, offset))
            if exact_only and child.dropped.num_tokens:
                usable = min(usable, child.dropped.begin)
            if exact_only and not node.is_behind_a_drop and not child.exact:
                # It is a restored copy, computed behind what another request had dropped.
                usable = 0
            if exact_only and child.moved:
                usable = 0
            better = (
                usable == reach and best is not None and _rank(child, usable) > _rank(best, reach)
            )
            if usable > reach or better:
                best, reach = child, usable
        return best, reach

    def _usable(self, node: KvNode, matched: int) -> int:
        """Return how many of `matched` leading tokens of a node can be used as a prefix."""
        if matched == len(node.key) or self.rule.can_split(node.dropped, matched):
            return matched
        # The key leaves inside the span, or behind it but too close. The node is used up to a
        # window before that, or to the span's end, if it can be cut there; else up to where it
        # begins.
        begin, end = node.dropped
        at = min(matched - (self.rule.window or cut_window(node)), end)
        if begin + LEAST_CUT <= at and self.has_tokens(node):
            return at
        return min(matched, begin)


def cut_window(node: KvNode) -> int:
    """Return how many tokens before a cut in a node's dropped span are computed again."""
    is_small = node.kept < SMALL_SHARE * node.dropped.num_tokens
    return WIDE_CUT_WINDOW if is_small else CUT_WINDOW


def _rank(node: KvNode, usable: int) -> tuple[bool, bool, bool]:
    return node.exact, not node.moved, usable == len(node.key)


def branch_points(node: KvNode, key: RadixKey, offset: int) -> set[int]:
    """Return the positions where key[offset:] leaves the children of a node that have its first
    token."""
    return {
        offset + child.key.match_at(key, offset)
        for child in node.siblings.get(key.child_key_at(offset), ())
    }


def furthest_cached(root: KvNode, key: RadixKey, matched: KvNode) -> tuple[int, KvNode]:
    """Return how many leading tokens of `key` are cached in whatever state, usable or not, and the
    node that has the last of them. matched: a node that `key` goes through, so that the tokens up
    to it need not be compared."""
    known = {node.id for node in matched.path()}
    longest, last, ends = 0, root, [(root, 0)]
    while ends:
        node, offset = ends.pop()
        if offset == len(key):
            break
        for child in node.siblings.get(key.child_key_at(offset), ()):
            whole = len(child.key)
            same = whole if child.id in known else child.key.match_at(key, offset)
            if offset + same > longest:
                longest, last = offset + same, child
            if same == whole:
                ends.append((child, offset + same))
    return longest, last

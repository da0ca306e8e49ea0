"""The sessions that a radix tree keeps: its branches, from the newest one on.

    root ── [ shared prefix ] ─┬─ [ turn ]─[ turn ]      a branch: from where it parts from the
                               └─ [ turn ]               others to its leaf

A branch goes by the number of its first node, which says nothing about what it holds. Bytes are
those of this rank's heads.

All of it runs in the scheduler's thread only. Looking through a tree stops after LONGEST_LOOK_S, as
all requests wait.
"""

from __future__ import annotations

import heapq
import time
from typing import Any

from kvtier_sglang.radix.node import KvNode
from kvtier_sglang.radix.tree import VariantRadixTree
from kvtier_sglang.tier.scopes import memory_in

LONGEST_LOOK_S = 0.05
# So many turns of each session are told, the newest ones.
MOST_TURNS = 8


def sessions(tree: VariantRadixTree, most: int) -> dict[str, Any]:
    """Return at most so many of a tree's branches, those that were used last.

    seen:     number of leaves that were looked at
    complete: True where that is all of them
    rows:     the branches, the one that was used last first
    """
    until = time.monotonic() + LONGEST_LOOK_S
    leaves: list[KvNode] = []
    complete = True
    for leaf in tree.nodes():
        if leaf.children:
            continue
        leaves.append(leaf)
        if time.monotonic() > until:
            complete = False
            break
    newest = heapq.nlargest(most, leaves, key=lambda leaf: (leaf.last_access_time, leaf.id))
    rows = [_session(tree, leaf) for leaf in newest]
    return {"seen": len(leaves), "complete": complete, "rows": rows}


def _first_of_its_own(leaf: KvNode) -> KvNode:
    """Return the first node of a branch that no other branch shares."""
    node = leaf
    while node.parent.parent is not None and len(node.parent.children) == 1:
        node = node.parent
    return node


def _session(tree: VariantRadixTree, leaf: KvNode) -> dict[str, Any]:
    """Return one branch, as the status page shows it."""
    first, path = _first_of_its_own(leaf), list(leaf.path())
    slots = sum(node.num_slots for node in path)
    per_slot = tree.allocator.pool.slot_bytes
    return {
        "branch": first.id,
        "memory": memory_in(leaf.key.extra_key),
        "context_tokens": leaf.stop,
        "shared_tokens": first.start,
        "idle_s": round(max(0.0, time.monotonic() - leaf.last_access_time), 3),
        "is_running": leaf.lock_ref > 0,
        "slots": slots,
        "bytes": slots * per_slot,
        "full_bytes": leaf.stop * per_slot,
        "tier_tokens": sum(max(n.sent_tokens, n.restored_tokens) for n in path),
        "restored_tokens": sum(n.restored_tokens for n in path),
        "num_turns": sum(not _is_memory(n) for n in path),
        "last_prompt": _last_prompt(path),
        "turns": [_turn(node) for node in path[:MOST_TURNS]],
    }


def _last_prompt(path: list[KvNode]) -> dict[str, Any] | None:
    """Return the account of the prompt of the last request that ended on a path, see misses.py;
    None where there is none. path: newest node first."""
    account = next((node.account for node in path if node.account is not None), None)
    return None if account is None else {"tokens": account.tokens, **account.summary()}


def _is_memory(node: KvNode) -> bool:
    """Return whether a node holds nothing, as a prefix memory stands for its tokens."""
    return not node.num_slots and memory_in(node.key.extra_key) is not None


def _turn(node: KvNode) -> dict[str, Any]:
    """Return one node of a path: a turn, or a part of one."""
    choice = node.choice
    return {
        "begin": node.start,
        "stop": node.stop,
        "is_memory": _is_memory(node),
        "is_compressed": node.compressed,
        "is_exact": node.exact and not node.dropped.num_tokens,
        "dropped_tokens": node.dropped.num_tokens,
        "slots": node.num_slots,
        "entries": node.entries,
        "reason": None if choice is None else choice.reason,
        "nll": None if choice is None else choice.nll,
        "quality": None if choice is None else choice.quality,
        "tier_tokens": max(node.sent_tokens, node.restored_tokens),
        "restored_tokens": node.restored_tokens,
    }

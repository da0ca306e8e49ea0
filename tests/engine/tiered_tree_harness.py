"""Turns on servers that share a tier, and what their trees hold afterwards."""

from __future__ import annotations

import functools
from array import array

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from tree_harness import MiniScheduler, run_turn
from tree_requests import context
from waiting import SAFETY_S

from kvtier.retention.keepkv import KeepKV
from kvtier.retention.refreshing import RefreshRule
from kvtier.retention.shares import FixedShare

REFRESH = RefreshRule(KeepKV(pool_width=1), merges=False)
SHARES = [None, FixedShare(0.5)]
# Several chunks, none of them a whole number of spans.
turn = functools.partial(run_turn, chunk=17)


def two_turns(s: MiniScheduler) -> list[int]:
    """The tokens of two turns, [0, 62) exact and [62, 105) computed behind what was dropped."""
    turn(s, context(60), [1, 2])
    turn(s, [*context(60), 1, 2, *context(40, seed=1)], [3, 4, 5])
    assert s.tree.tier.link.flush(SAFETY_S)
    return [*context(60), 1, 2, *context(40, seed=1), 3, 4, 5]


def shape(s: MiniScheduler):
    return sorted(
        (n.start, n.stop, n.prompt_stop, n.dropped, n.compressed, n.num_slots, n.kept_entries)
        for n in s.tree.nodes()
    )


def entries(s: MiniScheduler, tokens: list[int]) -> list[torch.Tensor]:
    """Return what every column holds of a context, with votes: dense entries, then packed ones."""
    node, _ = s.tree.walk(s.tree.root_node, RadixKey(array("q", tokens)), 0)
    row, packed = s.tree.path_device_indices(node), s.pool.packed
    dense = packed.dense_of[row]
    found = [side[dense[dense > 0]] for layer in s.pool.kv for side in layer]
    for span in packed.in_row(row):
        found += [packed.cells.k[span.cells], packed.cells.v[span.cells]]
        found += [] if packed.log_votes is None else [packed.log_votes[span.cells]]
    return found

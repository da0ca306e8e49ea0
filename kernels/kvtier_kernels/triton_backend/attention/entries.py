"""Tiles of retained entries: their keys, values and votes, found by slot."""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier_kernels.triton_backend.softmax import LOG2_E


@triton.jit
def load_keys(k, slot, head, inside, d, in_dim, stride_slot, stride_head):
    """As `load_entries`, but [dim, entries]: what takes fewer registers in large tiles."""
    at = k + slot[None, :] * stride_slot + head * stride_head + d[:, None]
    return tl.load(at, mask=inside[None, :] & in_dim[:, None], other=0.0)


@triton.jit
def load_entries(x, slot, head, inside, d, in_dim, stride_slot, stride_head):
    """Keys or values [entries, dim] of slots that are `inside`, 0 elsewhere. slot, head: int64."""
    at = x + slot[:, None] * stride_slot + head * stride_head + d[None, :]
    return tl.load(at, mask=inside[:, None] & in_dim[None, :], other=0.0)


@triton.jit
def with_votes(
    logits,
    votes,
    slot,
    head,
    g,
    rows,
    inside,
    stride_slot,
    stride_head,
    stride_group,
    VOTES: tl.constexpr,
):
    """logits [rows, entries] in base 2, with the entries' log-votes.

    slot, head: int64. g: each row's query head of its group, where `rows`. VOTES: 0 none, 1 per
    entry, 2 per entry and query head.
    """
    if VOTES == 1:
        bias = tl.load(votes + slot * stride_slot, mask=inside, other=0.0)
        logits += bias[None, :] * LOG2_E
    if VOTES == 2:
        of_slot = votes + slot[None, :] * stride_slot + head * stride_head
        mask = rows[:, None] & inside[None, :]
        logits += tl.load(of_slot + g[:, None] * stride_group, mask=mask, other=0.0) * LOG2_E
    return logits

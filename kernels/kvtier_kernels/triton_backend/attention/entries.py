"""Tiles of entries: their keys and values, found by slot."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_keys(k, slot, head, inside, d, in_dim, stride_slot, stride_head):
    """Load entries like `load_entries`, but as [dim, entries], which takes fewer registers in large
    tiles."""
    at = k + slot[None, :] * stride_slot + head * stride_head + d[:, None]
    return tl.load(at, mask=inside[None, :] & in_dim[:, None], other=0.0)


@triton.jit
def load_entries(x, slot, head, inside, d, in_dim, stride_slot, stride_head):
    """Keys or values [entries, dim] of slots that are `inside`, 0 elsewhere. slot, head: int64."""
    at = x + slot[:, None] * stride_slot + head * stride_head + d[None, :]
    return tl.load(at, mask=inside[:, None] & in_dim[None, :], other=0.0)

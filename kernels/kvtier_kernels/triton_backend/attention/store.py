"""New tokens' keys and values, written where their slots are."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def store_entries(
    k_new,
    v_new,
    k,
    v,
    slots,
    tokens,
    stride_kn_token,
    stride_kn_head,
    stride_vn_token,
    stride_vn_head,
    stride_k_slot,
    stride_k_head,
    stride_v_slot,
    stride_v_head,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """k_new, v_new [tokens, heads, DIM] -> k, v [slots, heads, DIM].

    Grid (tokens / BLOCK_T, heads).
    """
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = token < tokens
    d = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (d < DIM)[None, :]
    slot = tl.load(slots + token, mask=real, other=0).to(tl.int64)
    from_k = k_new + token[:, None] * stride_kn_token + head * stride_kn_head
    from_v = v_new + token[:, None] * stride_vn_token + head * stride_vn_head
    keys = tl.load(from_k + d[None, :], mask=inside)
    values = tl.load(from_v + d[None, :], mask=inside)
    to_k = k + slot[:, None] * stride_k_slot + head * stride_k_head
    to_v = v + slot[:, None] * stride_v_slot + head * stride_v_head
    tl.store(to_k + d[None, :], keys.to(k.dtype.element_ty), mask=inside)
    tl.store(to_v + d[None, :], values.to(v.dtype.element_ty), mask=inside)

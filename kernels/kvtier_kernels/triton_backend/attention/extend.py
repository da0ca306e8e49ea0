"""New tokens over the entries of their prefix and, causally, over themselves, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier_kernels.triton_backend.attention.entries import load_entries, load_keys
from kvtier_kernels.triton_backend.softmax import absorb, normalise, tile_logits


# `block_row` is a row of a table, which begins anywhere.
@triton.jit(do_not_specialize_on_alignment=["block_row"])
def extend_blocks(
    q,
    k_new,
    v_new,
    k,
    v,
    slots,
    indptr,
    q_indptr,
    block_request,
    block_row,
    out_o,
    out_lse,
    scale,
    stride_q_token,
    stride_q_head,
    stride_q_group,
    stride_kn_token,
    stride_kn_head,
    stride_vn_token,
    stride_vn_head,
    stride_k_slot,
    stride_k_head,
    stride_v_slot,
    stride_v_head,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IEEE: tl.constexpr,
):
    """q [tokens, heads, GROUP, DIM] -> out_o [tokens, splits, heads * GROUP, DIM] and out_lse.

    A program has BLOCK_M rows of one request and one KV head; row r is query head r % GROUP of
    token r // GROUP, so that a group reads its keys once. Prefix entries are cut in splits; the
    last split sees the new tokens as well. Grid (blocks, heads, splits), which is where their
    numbers come from: a variant for each would be compiled while requests wait.
    """
    block, head, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    heads, splits = tl.num_programs(1), tl.num_programs(2)
    request = tl.load(block_request + block)
    first_token = tl.load(q_indptr + request)
    new_tokens = tl.load(q_indptr + request + 1) - first_token
    row = tl.load(block_row + block) + tl.arange(0, BLOCK_M)
    token, g = row // GROUP, row % GROUP
    in_rows = token < new_tokens
    d = tl.arange(0, BLOCK_D)
    in_dim = d < DIM
    tile = in_rows[:, None] & in_dim[None, :]
    of_token = (first_token + token).to(tl.int64)
    from_q = of_token * stride_q_token + head * stride_q_head + g * stride_q_group
    queries = tl.load(q + from_q[:, None] + d[None, :], mask=tile, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    # The prefix.
    entries_begin, entries_end = tl.load(indptr + request), tl.load(indptr + request + 1)
    share = tl.cdiv(tl.cdiv(entries_end - entries_begin, splits), BLOCK_N) * BLOCK_N
    begin = entries_begin + split * share
    end = tl.minimum(begin + share, entries_end)
    for first in range(begin, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        inside = n < end
        visible = in_rows[:, None] & inside[None, :]
        slot = tl.load(slots + n, mask=inside, other=0).to(tl.int64)
        keys = load_keys(k, slot, head, inside, d, in_dim, stride_k_slot, stride_k_head)
        logits = tl.where(visible, tile_logits(queries, keys, scale, IEEE), float("-inf"))
        values = load_entries(v, slot, head, inside, d, in_dim, stride_v_slot, stride_v_head)
        values = values.to(queries.dtype)
        acc, peak, total = absorb(acc, peak, total, logits, values, IEEE)

    # The new tokens.
    if split == splits - 1:
        last = tl.minimum(tl.max(token, 0) + 1, new_tokens)
        for first in range(0, last, BLOCK_N):
            n = first + tl.arange(0, BLOCK_N)
            visible = in_rows[:, None] & (n[None, :] <= token[:, None])
            at = (first_token + n).to(tl.int64)
            keys = load_keys(k_new, at, head, n < last, d, in_dim, stride_kn_token, stride_kn_head)
            values = load_entries(
                v_new, at, head, n < last, d, in_dim, stride_vn_token, stride_vn_head
            ).to(queries.dtype)
            logits = tl.where(visible, tile_logits(queries, keys, scale, IEEE), float("-inf"))
            acc, peak, total = absorb(acc, peak, total, logits, values, IEEE)

    o, lse = normalise(acc, peak, total)
    out = ((of_token * splits + split) * heads + head) * GROUP + g
    tl.store(out_o + out[:, None] * DIM + d[None, :], o.to(out_o.dtype.element_ty), mask=tile)
    tl.store(out_lse + out, lse, mask=in_rows)

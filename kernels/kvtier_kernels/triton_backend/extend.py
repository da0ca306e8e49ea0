"""New tokens over the entries of their prefix and, causally, over themselves, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier_kernels.triton_backend.softmax import LOG2_E, absorb, normalise, tile_logits


@triton.jit
def _new_tile(
    k_new,
    v_new,
    first_token,
    head,
    n,
    inside,
    d,
    in_dim,
    queries,
    stride_kn_token,
    stride_kn_head,
    stride_vn_token,
    stride_vn_head,
):
    """Keys [dim, entries] and values [entries, dim] of the request's new tokens n."""
    of_new = (first_token + n).to(tl.int64)
    keys = tl.load(
        k_new + of_new[None, :] * stride_kn_token + head * stride_kn_head + d[:, None],
        mask=inside[None, :] & in_dim[:, None],
        other=0.0,
    )
    values = tl.load(
        v_new + of_new[:, None] * stride_vn_token + head * stride_vn_head + d[None, :],
        mask=inside[:, None] & in_dim[None, :],
        other=0.0,
    )
    return keys, values.to(queries.dtype)


@triton.jit
def extend_blocks(
    q,
    k_new,
    v_new,
    k,
    v,
    votes,
    slots,
    indptr,
    q_indptr,
    block_request,
    block_row,
    positions,
    settled,
    q_start,
    out_o,
    out_lse,
    scale,
    sink_tokens,
    recent_tokens,
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
    stride_votes_slot,
    stride_votes_head,
    stride_votes_group,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VOTES: tl.constexpr,
    WINDOW: tl.constexpr,
    IEEE: tl.constexpr,
):
    """q [tokens, HEADS, GROUP, DIM] -> out_o [tokens, SPLITS, HEADS * GROUP, DIM] and out_lse.

    A program has BLOCK_M rows of one request and one KV head; row r is query head r % GROUP of
    token r // GROUP, so that a group reads its keys once. Prefix entries are cut in SPLITS; the
    last split sees the new tokens as well. Grid (blocks, HEADS, SPLITS).
    """
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
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
    start = 0
    if WINDOW:
        start = tl.load(q_start + request)

    # The prefix.
    entries_begin, entries_end = tl.load(indptr + request), tl.load(indptr + request + 1)
    share = tl.cdiv(tl.cdiv(entries_end - entries_begin, SPLITS), BLOCK_N) * BLOCK_N
    begin = entries_begin + split * share
    end = tl.minimum(begin + share, entries_end)
    for first in range(begin, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        inside = n < end
        visible = in_rows[:, None] & inside[None, :]
        if WINDOW:
            position = tl.load(positions + n, mask=inside, other=0)
            always = tl.load(settled + n, mask=inside, other=0) != 0
            always = always | (position < sink_tokens)
            near = position[None, :] > (start + token)[:, None] - recent_tokens
            visible = visible & (always[None, :] | near)
        slot = tl.load(slots + n, mask=inside, other=0).to(tl.int64)
        keys = tl.load(
            k + slot[None, :] * stride_k_slot + head * stride_k_head + d[:, None],
            mask=inside[None, :] & in_dim[:, None],
            other=0.0,
        )
        logits = tile_logits(queries, keys, scale, IEEE)
        if VOTES == 1:
            bias = tl.load(votes + slot * stride_votes_slot, mask=inside, other=0.0)
            logits += bias[None, :] * LOG2_E
        if VOTES == 2:
            bias = tl.load(
                votes
                + slot[None, :] * stride_votes_slot
                + head * stride_votes_head
                + g[:, None] * stride_votes_group,
                mask=inside[None, :],
                other=0.0,
            )
            logits += bias * LOG2_E
        logits = tl.where(visible, logits, float("-inf"))
        values = tl.load(
            v + slot[:, None] * stride_v_slot + head * stride_v_head + d[None, :],
            mask=inside[:, None] & in_dim[None, :],
            other=0.0,
        ).to(queries.dtype)
        acc, peak, total = absorb(acc, peak, total, logits, values, IEEE)

    # The new tokens: under a window its sinks first, and then what is near.
    if split == SPLITS - 1:
        last = tl.minimum(tl.max(token, 0) + 1, new_tokens)
        near_from = 0
        if WINDOW:
            near_from = tl.maximum(tl.min(token, 0) - recent_tokens + 1, 0)
            sinks = tl.minimum(tl.maximum(sink_tokens - start, 0), near_from)
            for first in range(0, sinks, BLOCK_N):
                n = first + tl.arange(0, BLOCK_N)
                visible = in_rows[:, None] & (n < sinks)[None, :]
                keys, values = _new_tile(
                    k_new, v_new, first_token, head, n, n < sinks, d, in_dim, queries,
                    stride_kn_token, stride_kn_head, stride_vn_token, stride_vn_head,
                )  # fmt: skip
                logits = tile_logits(queries, keys, scale, IEEE)
                logits = tl.where(visible, logits, float("-inf"))
                acc, peak, total = absorb(acc, peak, total, logits, values, IEEE)
        for first in range(near_from, last, BLOCK_N):
            n = first + tl.arange(0, BLOCK_N)
            visible = in_rows[:, None] & (n[None, :] <= token[:, None])
            if WINDOW:
                near = n[None, :] > token[:, None] - recent_tokens
                visible = visible & (near | (start + n < sink_tokens)[None, :])
            keys, values = _new_tile(
                k_new, v_new, first_token, head, n, n < last, d, in_dim, queries,
                stride_kn_token, stride_kn_head, stride_vn_token, stride_vn_head,
            )  # fmt: skip
            logits = tl.where(visible, tile_logits(queries, keys, scale, IEEE), float("-inf"))
            acc, peak, total = absorb(acc, peak, total, logits, values, IEEE)

    o, lse = normalise(acc, peak, total)
    at = ((of_token * SPLITS + split) * HEADS + head) * GROUP + g
    tl.store(out_o + at[:, None] * DIM + d[None, :], o.to(out_o.dtype.element_ty), mask=tile)
    tl.store(out_lse + at, lse, mask=in_rows)

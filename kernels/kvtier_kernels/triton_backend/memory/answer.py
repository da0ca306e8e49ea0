"""States over prefixes: copied from the entry that answers, or attention over the kept KV."""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier_kernels.triton_backend.attention.entries import load_entries
from kvtier_kernels.triton_backend.softmax import absorb, normalise, tile_logits


@triton.jit(do_not_specialize=["stride_q_token"])
def answer_token(
    q,
    ids,
    entry,
    entry_o,
    entry_lse,
    looks_up,
    kept_k,
    kept_v,
    kept_indptr,
    o,
    lse,
    scale,
    stride_q_token,
    stride_q_head,
    stride_q_group,
    stride_k,
    stride_v,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IEEE: tl.constexpr,
):
    """q [tokens, heads, GROUP, DIM], entry [tokens] of `nearest_entry` -> o, lse of the same rows.

    entry_o, entry_lse, o and lse are contiguous; looks_up [memories, heads] as bytes.
    Grid (tokens, heads).
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    memory = tl.load(ids + token).to(tl.int64)
    known = memory >= 0
    found = tl.load(entry + token).to(tl.int64)
    own = memory * heads + head
    copies = tl.load(looks_up + own, mask=known, other=0).to(tl.int32) * (found >= 0).to(tl.int32)
    g, d, place = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    in_group, in_dim = g < GROUP, d < DIM
    rows = in_group[:, None] & in_dim[None, :]
    at = (token * heads + head) * GROUP + g
    to_o, to_lse = o + at[:, None] * DIM + d[None, :], lse + at
    if copies != 0:
        at = (found * heads + head) * GROUP + g
        theirs = tl.load(entry_o + at[:, None] * DIM + d[None, :], mask=rows)
        tl.store(to_o, theirs.to(o.dtype.element_ty), mask=rows)
        tl.store(to_lse, tl.load(entry_lse + at, mask=in_group), mask=in_group)
    else:
        queries = tl.load(
            q
            + token * stride_q_token
            + head * stride_q_head
            + g[:, None] * stride_q_group
            + d[None, :],
            mask=rows,
            other=0.0,
        )
        begin = tl.load(kept_indptr + own, mask=known, other=0)
        end = tl.load(kept_indptr + own + 1, mask=known, other=0)
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        for first in range(begin, end, BLOCK_N):
            n = first + place
            inside = n < end
            row = n.to(tl.int64)
            keys = load_entries(kept_k, row, 0, inside, d, in_dim, stride_k, 0)
            logits = tile_logits(queries, tl.trans(keys), scale, IEEE)
            logits = tl.where(inside[None, :], logits, float("-inf"))
            values = load_entries(kept_v, row, 0, inside, d, in_dim, stride_v, 0)
            values = values.to(queries.dtype)
            acc, peak, total = absorb(acc, peak, total, logits, values, IEEE)
        over_kept, log = normalise(acc, peak, total)
        tl.store(to_o, over_kept.to(o.dtype.element_ty), mask=rows)
        tl.store(to_lse, log, mask=in_group)

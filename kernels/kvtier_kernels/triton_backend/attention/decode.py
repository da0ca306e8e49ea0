"""Stage one of decoding: each unit's stretch of entries, for one KV head and its GQA group."""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier_kernels.triton_backend.attention.entries import load_entries, with_votes
from kvtier_kernels.triton_backend.softmax import absorb, normalise, tile_logits


@triton.jit(
    do_not_specialize=["requests", "stride_votes_slot", "stride_votes_head", "stride_votes_group"]
)
def decode_units(
    q,
    k,
    v,
    votes,
    slots,
    indptr,
    units_indptr,
    unit_request,
    stretch,
    head_ids,
    part_o,
    part_lse,
    scale,
    requests,
    stride_q_request,
    stride_q_head,
    stride_q_group,
    stride_k_slot,
    stride_k_head,
    stride_v_slot,
    stride_v_head,
    stride_votes_slot,
    stride_votes_head,
    stride_votes_group,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VOTES: tl.constexpr,
    IEEE: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """q [requests, heads, GROUP, DIM] -> part_o [units, heads * GROUP, DIM] and part_lse, float32.

    VOTES: 0 none, 1 per entry, 2 per entry and query head. MAPPED: q holds more heads, of which
    `head_ids` are ours. Grid (units, heads).
    """
    unit, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    request = tl.load(unit_request + unit)
    if request < requests:
        size = tl.load(stretch)
        begin = tl.load(indptr + request) + (unit - tl.load(units_indptr + request)) * size
        end = tl.minimum(begin + size, tl.load(indptr + request + 1))
        g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        in_group, in_dim = g < GROUP, d < DIM
        rows = in_group[:, None] & in_dim[None, :]
        q_head = head
        if MAPPED:
            q_head = tl.load(head_ids + head)
        from_q = request.to(tl.int64) * stride_q_request + q_head * stride_q_head
        queries = tl.load(
            q + from_q + g[:, None] * stride_q_group + d[None, :], mask=rows, other=0.0
        )
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        # Slots come a tile ahead: a load that waits for its own address is not issued early.
        place = tl.arange(0, BLOCK_N)
        coming = tl.load(slots + begin + place, mask=begin + place < end, other=0)
        for first in range(begin, end, BLOCK_N):
            n = first + place
            inside = n < end
            slot = coming.to(tl.int64)
            coming = tl.load(slots + n + BLOCK_N, mask=n + BLOCK_N < end, other=0)
            keys = load_entries(k, slot, head, inside, d, in_dim, stride_k_slot, stride_k_head)
            logits = with_votes(
                tile_logits(queries, tl.trans(keys), scale, IEEE), votes, slot, head, g, in_group,
                inside, stride_votes_slot, stride_votes_head, stride_votes_group, VOTES,
            )  # fmt: skip
            logits = tl.where(inside[None, :], logits, float("-inf"))
            values = load_entries(v, slot, head, inside, d, in_dim, stride_v_slot, stride_v_head)
            values = values.to(queries.dtype)
            acc, peak, total = absorb(acc, peak, total, logits, values, IEEE)
        o, lse = normalise(acc, peak, total)
        at = (unit.to(tl.int64) * tl.num_programs(1) + head) * GROUP + g
        tl.store(part_o + at[:, None] * DIM + d[None, :], o, mask=rows)
        tl.store(part_lse + at, lse, mask=in_group)

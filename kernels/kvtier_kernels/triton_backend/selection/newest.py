"""The newest queries over all keys (see kvtier_kernels.prediction), their logits never in memory.

What is wanted is a number per key (a mean over queries) or per query (a sum over keys), so each
kernel reads the keys once and reduces its tile the one way or the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier_kernels.triton_backend.softmax import LOG2_E, log_of, tile_logits, weigh


@triton.jit
def _key_tile(keys, n, end, d, stride_token, DIM: tl.constexpr):
    """[dim, entries]"""
    inside = (n < end)[None, :] & (d < DIM)[:, None]
    return tl.load(
        keys + n.to(tl.int64)[None, :] * stride_token + d[:, None], mask=inside, other=0.0
    )


@triton.jit(do_not_specialize=["window", "tokens"])
def mean_of_queries(
    q,
    keys,
    offset,
    out,
    window,
    tokens,
    scale,
    stride_q_window,
    stride_q_head,
    stride_q_group,
    stride_keys_head,
    stride_keys_token,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IEEE: tl.constexpr,
):
    """q [window, heads, GROUP, DIM], offset [heads, GROUP, window] float32, natural
    -> out [heads, GROUP, tokens]: log-sum-exp of logits + offset over the window, natural.

    Grid (blocks of keys, heads).
    """
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    tile = _key_tile(keys + head * stride_keys_head, n, tokens, d, stride_keys_token, DIM)
    for g in range(GROUP):
        peak = tl.full([BLOCK_N], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_N], tl.float32)
        for first in range(0, window, BLOCK_W):
            w = first + tl.arange(0, BLOCK_W)
            from_q = q + w[:, None] * stride_q_window + head * stride_q_head + g * stride_q_group
            queries = tl.load(
                from_q + d[None, :], mask=(w < window)[:, None] & (d < DIM)[None, :], other=0.0
            )
            added = tl.load(
                offset + (head * GROUP + g) * window + w, mask=w < window, other=float("-inf")
            )
            logits = tile_logits(queries, tile, scale, IEEE) + (added * LOG2_E)[:, None]
            peak, total, _, _ = weigh(peak, total, logits, 0)
        log = log_of(peak, total)
        tl.store(out + (head * GROUP + g) * tokens + n, log, mask=n < tokens)


@triton.jit(do_not_specialize=["window", "tokens"])
def sum_over_keys(
    q,
    keys,
    part,
    window,
    tokens,
    stretch,
    scale,
    stride_q_window,
    stride_q_head,
    stride_q_group,
    stride_keys_head,
    stride_keys_token,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IEEE: tl.constexpr,
):
    """q [window, heads, GROUP, DIM] -> part [stretches, window, heads, GROUP]: each query's
    log-sum-exp over a stretch of keys, natural. Row r is query head r % GROUP of query r // GROUP.

    Grid (stretches, heads, blocks of rows).
    """
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    w, g = row // GROUP, row % GROUP
    real = w < window
    d = tl.arange(0, BLOCK_D)
    from_q = q + w * stride_q_window + head * stride_q_head + g * stride_q_group
    inside = real[:, None] & (d < DIM)[None, :]
    queries = tl.load(from_q[:, None] + d[None, :], mask=inside, other=0.0)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    begin = tl.program_id(0) * stretch
    end = tl.minimum(begin + stretch, tokens)
    for first in range(begin, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        tile = _key_tile(keys + head * stride_keys_head, n, end, d, stride_keys_token, DIM)
        logits = tile_logits(queries, tile, scale, IEEE)
        logits = tl.where((n < end)[None, :], logits, float("-inf"))
        peak, total, _, _ = weigh(peak, total, logits, 1)
    heads = tl.num_programs(1)
    at = ((tl.program_id(0) * window + w) * heads + head) * GROUP + g
    tl.store(part + at, log_of(peak, total), mask=real)

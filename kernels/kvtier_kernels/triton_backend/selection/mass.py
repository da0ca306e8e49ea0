"""Window mass (see kvtier_kernels.scores) without ever holding a window's logits.

A column of a softmax needs its rows' sums first, so logits are computed twice: once for each
row's log-sum-exp, once for each column's sum of weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier_kernels.triton_backend.softmax import tile_logits, weigh


@triton.jit
def _queries(
    q,
    begin,
    end,
    head,
    row,
    d,
    stride_q_token,
    stride_q_head,
    stride_q_group,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
):
    """Rows of a window, `GROUP` per token: [rows, dim], and which of them there are."""
    token = begin + row // GROUP
    real = token < end
    at = token.to(tl.int64) * stride_q_token + head * stride_q_head + row % GROUP * stride_q_group
    inside = real[:, None] & (d < DIM)[None, :]
    return tl.load(q + at[:, None] + d[None, :], mask=inside, other=0.0), real


@triton.jit
def _keys(k, end, head, n, d, stride_k_token, stride_k_head, DIM: tl.constexpr):
    """Keys [dim, tokens] of the tokens n."""
    at = n.to(tl.int64) * stride_k_token + head * stride_k_head
    inside = (n < end)[None, :] & (d < DIM)[:, None]
    return tl.load(k + at[None, :] + d[:, None], mask=inside, other=0.0)


@triton.jit
def window_rows(
    q,
    k,
    window_begin,
    window_end,
    logs,
    scale,
    stride_q_token,
    stride_q_head,
    stride_q_group,
    stride_k_token,
    stride_k_head,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IEEE: tl.constexpr,
):
    """-> logs [tokens, heads, GROUP], each row's log2-sum over its window. Grid (windows, heads,
    blocks of rows)."""
    window, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(window_begin + window), tl.load(window_end + window)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.program_id(2) * BLOCK_M < (end - begin) * GROUP:
        d = tl.arange(0, BLOCK_D)
        queries, real = _queries(
            q, begin, end, head, row, d,
            stride_q_token, stride_q_head, stride_q_group, GROUP, DIM,
        )  # fmt: skip
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        for first in range(begin, end, BLOCK_N):
            n = first + tl.arange(0, BLOCK_N)
            keys = _keys(k, end, head, n, d, stride_k_token, stride_k_head, DIM)
            logits = tile_logits(queries, keys, scale, IEEE)
            logits = tl.where((n < end)[None, :], logits, float("-inf"))
            peak, total, _, _ = weigh(peak, total, logits, 1)
        token = (begin + row // GROUP).to(tl.int64)
        at = (token * tl.num_programs(1) + head) * GROUP + row % GROUP
        tl.store(logs + at, peak + tl.log2(total), mask=real)


@triton.jit(do_not_specialize=["tokens"])
def window_columns(
    q,
    k,
    window_begin,
    window_end,
    logs,
    mass,
    scale,
    tokens,
    stride_q_token,
    stride_q_head,
    stride_q_group,
    stride_k_token,
    stride_k_head,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IEEE: tl.constexpr,
):
    """-> mass [heads, tokens], each column's sum of weights over GROUP. Grid (windows, heads,
    blocks of columns)."""
    window, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(window_begin + window), tl.load(window_end + window)
    n = begin + tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    if begin + tl.program_id(2) * BLOCK_N < end:
        d = tl.arange(0, BLOCK_D)
        keys = _keys(k, end, head, n, d, stride_k_token, stride_k_head, DIM)
        acc = tl.zeros([BLOCK_N], tl.float32)
        for first in range(0, (end - begin) * GROUP, BLOCK_M):
            row = first + tl.arange(0, BLOCK_M)
            queries, real = _queries(
                q, begin, end, head, row, d,
                stride_q_token, stride_q_head, stride_q_group, GROUP, DIM,
            )  # fmt: skip
            token = (begin + row // GROUP).to(tl.int64)
            at = (token * tl.num_programs(1) + head) * GROUP + row % GROUP
            # A row that is not there weighs nothing.
            log = tl.load(logs + at, mask=real, other=float("inf"))
            logits = tile_logits(queries, keys, scale, IEEE)
            acc += tl.sum(tl.exp2(logits - log[:, None]), 0)
        at = head.to(tl.int64) * tokens + n
        tl.store(mass + at, acc / GROUP, mask=n < end)

"""The kept key that each dropped one is most like, found with no similarity ever in memory."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rest", "count", "stride_dropped_head", "stride_target_head"])
def nearest_home(
    keys,
    dropped,
    homes,
    inverse,
    target,
    floor,
    rest,
    count,
    stride_keys_head,
    stride_keys_token,
    stride_dropped_head,
    stride_target_head,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IEEE: tl.constexpr,
):
    """homes [heads, count, DIM], contiguous; inverse [heads, count], one by their length, NaN for
    a home of no numbers -> target of the `rest` dropped entries of each head.

    Each place of a tile remembers the best that passed it, and where, so that nothing is compared
    across a row before the end. A comparison with NaN is false. Of equal ones the first wins.
    Grid (blocks of dropped entries, heads).
    """
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < rest
    d, place = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    in_dim = d < DIM
    token = tl.load(dropped + head * stride_dropped_head + row, mask=real, other=0)
    own = tl.load(
        keys + head * stride_keys_head + token[:, None] * stride_keys_token + d[None, :],
        mask=real[:, None] & in_dim[None, :],
        other=0.0,
    )
    homes += head * count * DIM
    inverse += head * count
    best = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
    winner = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for first in range(0, count, BLOCK_N):
        n = first + place
        inside = n < count
        theirs = tl.load(
            homes + n[None, :] * DIM + d[:, None],
            mask=inside[None, :] & in_dim[:, None],
            other=0.0,
        )
        if IEEE:
            alike = tl.dot(own.to(tl.float32), theirs.to(tl.float32), input_precision="ieee")
        else:
            alike = tl.dot(own, theirs)
        alike *= tl.load(inverse + n, mask=inside, other=float("nan"))[None, :]
        better = alike > best
        best = tl.where(better, alike, best)
        winner = tl.where(better, first, winner)
    top = tl.max(best, 1)
    home = tl.min(tl.where(best == top[:, None], winner + place[None, :], count), 1)
    own = own.to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(own * own, 1)), 1e-12)
    # Rounding must not lift equal keys above a floor of 1.
    merges = (top / length > floor) & (floor < 1)
    home = tl.where(merges, home, -1)
    tl.store(target + head * stride_target_head + token, home.to(tl.int64), mask=real)

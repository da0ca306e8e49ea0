"""Parts that the attention kernels share: one step of online softmax, and the logits of a tile.

Logits are kept in base 2 (`exp2` is what the hardware has), so a kernel multiplies `scale` and
votes by log2(e) once, and what leaves a kernel is the natural log-sum-exp of the contract.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def finite_max(x):
    """0 where nothing was seen yet, so that differences are never inf - inf."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def tile_logits(q, k, scale, IEEE: tl.constexpr):
    """q [rows, dim] over k [dim, entries] -> [rows, entries], base 2.

    IEEE: products in float32 instead of on tensor cores, which have no such thing.
    """
    if IEEE:
        q, k = q.to(tl.float32), k.to(tl.float32)
        return tl.dot(q, k, input_precision="ieee") * (scale * LOG2_E)
    return tl.dot(q, k.to(q.dtype)) * (scale * LOG2_E)


@triton.jit
def weigh(peak, total, logits, AXIS: tl.constexpr):
    """One step of a running log-sum-exp: peak and sum of weights, and a tile's logits, which are
    summed along AXIS -> both of all, the tile's weights, and what former weights are worth now."""
    new_peak = tl.maximum(peak, tl.max(logits, AXIS))
    shift = finite_max(new_peak)
    weights = tl.exp2(logits - tl.expand_dims(shift, AXIS))
    keep = tl.exp2(peak - shift)
    return new_peak, total * keep + tl.sum(weights, AXIS), weights, keep


@triton.jit
def log_of(peak, total):
    """-> the natural log-sum-exp; -inf where nothing was seen."""
    seen = total > 0
    log = (finite_max(peak) + tl.log2(tl.where(seen, total, 1.0))) * LN_2
    return tl.where(seen, log, float("-inf"))


@triton.jit
def absorb(acc, peak, total, logits, v, IEEE: tl.constexpr):
    """One step of online softmax: the running (sum of weighted values, peak, sum of weights) and
    a tile's logits [rows, entries] and values [entries, dim] -> the three of both."""
    new_peak, total, weights, keep = weigh(peak, total, logits, 1)
    acc = acc * keep[:, None]
    if IEEE:
        acc = tl.dot(weights, v.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc)
    return acc, new_peak, total


@triton.jit
def normalise(acc, peak, total):
    """-> o [rows, dim], lse [rows] (natural); zeros and -inf for rows that saw nothing."""
    return acc / tl.where(total > 0, total, 1.0)[:, None], log_of(peak, total)

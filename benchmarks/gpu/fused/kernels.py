"""RMSNorm, SiLU and product, and rotation: what SGLang's `forward_native` computes, in one each.

Inside everything is float32, and it is rounded to the dtype of the input where PyTorch rounds it,
so that a benchmark's tokens do not depend on whether these kernels run.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x,
    residual,
    weight,
    out,
    added,
    eps,
    stride_x,
    stride_residual,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):
    """x [rows, DIM] -> out [rows, DIM]; ADDS: added [rows, DIM] = x + residual is what is normed,
    before it is rounded. A program per row."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < DIM
    values = tl.load(x + row * stride_x + d, mask=inside, other=0).to(tl.float32)
    if ADDS:
        at = residual + row * stride_residual + d
        values += tl.load(at, mask=inside, other=0).to(tl.float32)
        tl.store(added + row * DIM + d, values.to(added.dtype.element_ty), mask=inside)
    variance = tl.sum(values * values, 0) / DIM
    normed = values * tl.rsqrt(variance + eps)
    normed *= tl.load(weight + d, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * DIM + d, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_and_mul(x, out, stride_x, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """x [rows, 2 * DIM] -> out [rows, DIM]: silu of the first half times the second. Grid (rows,
    DIM / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < DIM
    gate = tl.load(x + row * stride_x + d, mask=inside, other=0).to(tl.float32)
    factor = tl.load(x + row * stride_x + DIM + d, mask=inside, other=0).to(tl.float32)
    silu = (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * DIM + d, (silu * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    x, heads, first, cos, sin, i, HALF: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr
):
    """HEADS heads of a token from `first` on, in place. x: the token's first number."""
    head = first + tl.arange(0, HEADS)
    inside = (head < heads)[:, None] & (i < HALF)[None, :]
    low = x + head[:, None] * DIM + i[None, :]
    dtype = x.dtype.element_ty
    a = tl.load(low, mask=inside, other=0).to(tl.float32)
    b = tl.load(low + HALF, mask=inside, other=0).to(tl.float32)
    c, s = cos[None, :], sin[None, :]
    new_a = (a * c).to(dtype).to(tl.float32) - (b * s).to(dtype).to(tl.float32)
    new_b = (b * c).to(dtype).to(tl.float32) + (a * s).to(dtype).to(tl.float32)
    tl.store(low, new_a.to(dtype), mask=inside)
    tl.store(low + HALF, new_b.to(dtype), mask=inside)


@triton.jit
def rotate_halves(
    q,
    k,
    cos_sin,
    positions,
    q_heads,
    k_heads,
    stride_q,
    stride_k,
    stride_cos_sin,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """q [tokens, q_heads * DIM] and k [tokens, k_heads * DIM] in place: number i < HALF of a head
    with number i + HALF, what is behind 2 * HALF stays. cos_sin [positions, 2 * HALF]: first
    cosines, then sines. Grid (tokens, q_heads / HEADS + k_heads / HEADS)."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    at = cos_sin + tl.load(positions + token).to(tl.int64) * stride_cos_sin + i
    dtype = q.dtype.element_ty
    cos = tl.load(at, mask=i < HALF, other=0).to(dtype).to(tl.float32)
    sin = tl.load(at + HALF, mask=i < HALF, other=0).to(dtype).to(tl.float32)
    blocks_of_q = tl.cdiv(q_heads, HEADS)
    if block < blocks_of_q:
        _rotate(q + token * stride_q, q_heads, block * HEADS, cos, sin, i, HALF, DIM, HEADS)
    else:
        first = (block - blocks_of_q) * HEADS
        _rotate(k + token * stride_k, k_heads, first, cos, sin, i, HALF, DIM, HEADS)

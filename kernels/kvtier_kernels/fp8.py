"""KV of one byte a number: what a number becomes, and how such tensors are indexed.

An fp8 KV cache holds x / scale, one scale for the keys and one for the values of a layer (1 unless
the checkpoint brings others). What reads it works in these *stored units*: queries are multiplied
by the scale of keys and outputs by that of values, so kernels and rules never see a scale.
"""

from __future__ import annotations

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# Every number of both types is one of this type's too.
WIDE = torch.bfloat16


def raw(x: torch.Tensor) -> torch.Tensor:
    """x as PyTorch can index, fill and compare it on every device: of fp8 its bytes, shared."""
    return x.view(torch.uint8) if x.dtype in FP8_DTYPES else x


def take(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """`index_select` of any dtype: a copy."""
    return raw(x).index_select(dim, index).view(x.dtype)


def put(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """`x[index] = rows` of any dtype. rows: like `x[index]`, in whatever dtype."""
    raw(x)[index] = raw(narrowed(rows, x.dtype))


def widened(x: torch.Tensor) -> torch.Tensor:
    """x in a dtype that arithmetic works in: fp8 exactly as bfloat16, others as they are."""
    return x.to(WIDE) if x.dtype in FP8_DTYPES else x


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in a dtype; what fp8 has no number for becomes its largest, not a NaN."""
    if dtype in FP8_DTYPES and x.dtype != dtype:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


def as_stored(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """x in stored units, rounded to the numbers that a cache of `dtype` has, in x's own dtype.

    x: any float dtype. scale: of this layer's keys or values. A cache of x's dtype takes x as it
    is.
    """
    if x.dtype == dtype:
        return x
    stored = x if scale == 1.0 else x / scale
    return narrowed(stored, dtype).to(x.dtype)


def restored(x: torch.Tensor, scale: float) -> torch.Tensor:
    """The numbers that x `as_stored` stands for, to compute with. x: fp8, or widened."""
    return widened(x) if scale == 1.0 else x.float() * scale

"""The limits of FlashInfer: the calls that it can serve. The others go to the Triton kernels, which
take everything."""

from __future__ import annotations

import torch

from kvtier_kernels.base import RaggedKV
from kvtier_kernels.fp8 import FP8_DTYPES

HEAD_DIMS = (64, 128, 256)
QUERY_DTYPES = (torch.float16, torch.bfloat16)
# It copies KV in pieces of so many bytes, and a query's rows too.
PIECE_BYTES = 16
# It keeps strides as unsigned 32-bit numbers.
MAX_STRIDE = (1 << 32) - 1


def fits(q: torch.Tensor, kv: RaggedKV) -> bool:
    """Return whether FlashInfer's kernels take these queries over this KV, where it lies.

    K and V have to be of one type and one layout; which one does not matter, as slots and heads
    have strides of their own: head-major buffers are served without a copy.
    """
    return (
        q.shape[-1] in HEAD_DIMS
        and q.dtype in QUERY_DTYPES
        and kv.k.dtype in (q.dtype, *FP8_DTYPES)
        and kv.v.dtype == kv.k.dtype
        and kv.k.stride() == kv.v.stride()
        and is_aligned(kv.k)
        and is_aligned(kv.v)
    )


def is_aligned(x: torch.Tensor) -> bool:
    """Return whether every row of x [..., dim] lies in one piece and begins where a copy may
    begin."""
    rows = (x.storage_offset(), *x.stride()[:-1])
    in_pieces = all(at * x.itemsize % PIECE_BYTES == 0 for at in rows)
    return bool(x.stride(-1) == 1 and in_pieces and max(rows[1:]) <= MAX_STRIDE)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy that `is_aligned`."""
    return x if is_aligned(x) else x.contiguous()

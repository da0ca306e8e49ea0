"""Calls every kind of extend pass once before there are requests, so that none waits for compiling.

On a GPU, Triton takes a second or more to compile a variant of a kernel when it is first called,
and cuDNN prepares each new shape. What decoding needs is compiled when CUDA graphs are captured.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvtier_kernels import AttentionKernels, RaggedKV, Window
from kvtier_sglang.pool.kv_pool import ClassBuffers, HeadSplitKVPool


def warm_up(
    kernels: AttentionKernels,
    pool: HeadSplitKVPool,
    *,
    dtype: torch.dtype,
    chunk: int,
    context: int,
    window: tuple[int, int] | None,
) -> None:
    """Extend each head class, with and without votes, over the entry in its padding slot.

    dtype: of queries. chunk, context: the most new tokens of a pass, and the most entries of a
    request. window: sink and recent tokens of a streaming prefill, None for an exact one. Writes
    nothing into the pool.
    """
    device = pool.log_votes.device
    for buffers, votes, is_locality in _classes(pool):
        limits = window if is_locality else None
        q = torch.zeros(1, pool.head_num, pool.group, pool.head_dim, dtype=dtype, device=device)
        for new, entries in kernels.extend_shapes(q, chunk, context):
            # Of the large shapes only calls without votes and without a window differ.
            if new > 1 and limits is not None:
                continue
            q = torch.zeros(new, *q.shape[1:], dtype=dtype, device=device)
            k = torch.zeros(new, pool.head_num, pool.head_dim, dtype=dtype, device=device)
            slots = torch.zeros(entries, dtype=torch.int64, device=device)
            streaming = None
            if limits is not None:
                settled = torch.ones(entries, dtype=torch.bool, device=device)
                streaming = Window(*limits, (entries,), slots, settled)
            for kind in (None,) if votes is None or new > 1 else (None, votes):
                voted = None if kind is None else torch.ones(1, device=device)
                kernels.extend_heads(
                    q,
                    k,
                    k,
                    (0, new),
                    RaggedKV(buffers.k, buffers.v, kind),
                    kernels.plan(slots, (0, entries), voted),
                    1.0,
                    buffers.head_map,
                    torch.empty_like(q),
                    streaming,
                )


def _classes(
    pool: HeadSplitKVPool,
) -> Iterator[tuple[ClassBuffers, torch.Tensor | None, bool]]:
    """One layer of each head class that has heads anywhere, its votes, and whether it is the
    locality class. Kernels are compiled for nothing in which layers differ."""
    ca = next((i for i, buffers in enumerate(pool.ca) if buffers.heads), None)
    if ca is not None:
        yield pool.ca[ca], None if pool.ca_votes is None else pool.ca_votes[ca], False
    locality = next((buffers for buffers in pool.locality if buffers.heads), None)
    if locality is not None:
        yield locality, pool.log_votes, True


__all__ = ["warm_up"]

"""Every kind of extend pass once, before there are requests: what is compiled then makes none wait.

On a GPU, Triton compiles a variant of a kernel when it is first called, for a second or more, and
cuDNN prepares each new shape. CUDA graphs have called what decoding needs when they are captured.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvtier_kernels import AttentionKernels, RaggedKV, Window
from kvtier_sglang.pool import ClassBuffers, HeadSplitKVPool


def warm_up(
    kernels: AttentionKernels,
    pool: HeadSplitKVPool,
    *,
    dtype: torch.dtype,
    chunk: int,
    context: int,
    window: tuple[int, int] | None,
) -> None:
    """Extend by each head class, with and without votes, from what lies in padding slots.

    dtype: of queries. chunk, context: the most new tokens of a pass, and the most entries of a
    request. window: sink and recent tokens of a streaming prefill, None for an exact one. Writes
    nothing into the pool.
    """
    device = pool.log_votes.device
    for buffers, votes in _classes(pool):
        kinds = [None, votes] if votes is not None else [None]
        streams = window is not None and any(buffers is one for one in pool.locality)
        q = torch.zeros(1, pool.head_num, pool.group, pool.head_dim, dtype=dtype, device=device)
        for new, entries in kernels.extend_shapes(q, chunk, context):
            q = torch.zeros(new, *q.shape[1:], dtype=dtype, device=device)
            k = torch.zeros(new, pool.head_num, pool.head_dim, dtype=dtype, device=device)
            slots = torch.zeros(entries, dtype=torch.int64, device=device)
            limits = None
            if window is not None and streams:
                settled = torch.ones(entries, dtype=torch.bool, device=device)
                limits = Window(*window, (entries,), slots, settled)
            for kind in kinds if new == 1 else kinds[:1]:
                voted = None if kind is None else torch.ones(1, device=device)
                plan = kernels.plan(slots, (0, entries), voted)
                kv = RaggedKV(buffers.k, buffers.v, kind)
                ends, out = (0, new), torch.empty_like(q)
                kernels.extend_heads(q, k, k, ends, kv, plan, 1.0, buffers.head_map, out, limits)


def _classes(pool: HeadSplitKVPool) -> Iterator[tuple[ClassBuffers, torch.Tensor | None]]:
    """One layer of each class, where there is one, and its votes: layers differ in nothing that
    kernels are compiled for."""
    for index, buffers in enumerate(pool.ca):
        if buffers.heads:
            yield buffers, None if pool.ca_votes is None else pool.ca_votes[index]
            break
    for buffers in pool.locality:
        if buffers.heads:
            yield buffers, pool.log_votes
            break


__all__ = ["warm_up"]

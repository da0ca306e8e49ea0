"""Calls every kind of pass once before there are requests, so that none waits for compiling.

On a GPU, Triton takes a second or more to compile a variant of a kernel when it is first called,
and cuDNN prepares each new shape. What more decoding needs is compiled when CUDA graphs are
captured. On a CPU numba compiles decoding, or loads what it has compiled before.
"""

from __future__ import annotations

import torch

from kvtier_kernels import AttentionKernels, RaggedKV
from kvtier_kernels.lists import ListTables
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool


def warm_up(
    kernels: AttentionKernels,
    pool: HeadPagedKVPool,
    *,
    dtype: torch.dtype,
    chunk: int,
    context: int,
) -> None:
    """Extend over the entry in the padding slot, as a token and as a list, and decode over the
    list. Writes nothing into the pool.

    dtype: of queries. chunk, context: the most new tokens of a pass, and the most entries of a
    request.
    """
    device, kv = pool.device, RaggedKV(*pool.kv[0])
    q = torch.zeros(1, pool.head_num, pool.group, pool.head_dim, dtype=dtype, device=device)
    for new, entries in kernels.extend_shapes(q, chunk, context):
        q = torch.zeros(new, *q.shape[1:], dtype=dtype, device=device)
        k = torch.zeros(new, pool.head_num, pool.head_dim, dtype=dtype, device=device)
        slots = torch.zeros(entries, dtype=torch.int64, device=device)
        plan = kernels.plan(slots, (0, entries))
        state = kernels.extend(q, k, k, (0, new), kv, plan, 1.0)
    kernels.merge_states(state, state)
    one = torch.zeros(1, 1, dtype=torch.int32, device=device)
    columns = pool.layer_num * pool.head_num
    words = torch.zeros(1, columns, dtype=torch.int64, device=device)
    tables = ListTables(words, words.to(torch.int32), one)
    plan = kernels.lists.plan(tables, one[0], one[0] + 1, pool.layer_num, pool.head_num)
    none = kernels.lists.plan(tables, one[0], one[0], pool.layer_num, pool.head_num)
    for cells, over in ((pool.cells, plan), (pool.coded_cells, none)):
        if cells is not None:
            kernels.lists.extend(q[:1], (0, 1), cells, over, 0, 1.0)
            kernels.lists.decode(q[:1], cells, over, 0, 1.0)


__all__ = ["warm_up"]

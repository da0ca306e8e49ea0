"""The plan of a forward pass, made once per pass and shared by all layers. Nothing is padded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from kvtier_kernels import AttentionKernels, RaggedKV
from kvtier_sglang.attention.drafts import tree_masks
from kvtier_sglang.attention.lists import ListPlans, RequestLists, blank_tables
from kvtier_sglang.attention.windows import Windows
from kvtier_sglang.compression.selection import PrefillRows
from kvtier_sglang.memory.passes import MemoryPass, MemoryPasses
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool


@dataclass(frozen=True)
class BatchPlan:
    """The entries that one forward pass attends over.

    write:    slots of this pass's new tokens.
    q_indptr: row ranges of the requests in an extend pass; empty in a decoding one.
    lists:    of all that was there before, or, in a decoding pass, is there now; None in an extend
              pass in which no request has anything compressed.
    prefixes: in an extend pass, a plan over the slots of what was there before and is not in
              `lists`.
    prefill:  what an extend pass computes, where selection wants to know; else None.
    drafts:   in a pass that verifies drafts, bool [requests, drafts, drafts]: which drafts each of
              them sees. It is planned like a decoding one, over what was there before.
    memory:   what the pass asks of prefix memories; None where no request has one.
    tails:    in an extend pass, what layers with a window see of each request's prefix.
    windows:  in a decoding pass, a plan of theirs.
    """

    write: torch.Tensor
    q_indptr: tuple[int, ...] = ()
    lists: ListPlans | None = None
    prefixes: Any = None
    prefill: PrefillRows | None = None
    drafts: torch.Tensor | None = None
    memory: MemoryPass | None = None
    tails: Sequence[torch.Tensor] = ()
    windows: Any = None


class Planner:
    """Plans the passes of one pool.

    req_to_token: SGLang's table of request rows. window: tokens that some layers attend to; None
    where all attend to everything.
    """

    def __init__(
        self,
        kernels: AttentionKernels,
        pool: HeadPagedKVPool,
        req_to_token: torch.Tensor,
        window: int | None = None,
    ) -> None:
        self.kernels = kernels
        self.pool = pool
        self.req_to_token = req_to_token
        self.lists = RequestLists(kernels, pool, req_to_token)
        # Set where there are prefix memories.
        self.memories: MemoryPasses | None = None
        self.windows = None
        if window is not None:
            self.windows = Windows(kernels, pool, len(req_to_token) + 1, window)
            self.lists.finds_gaps = True

    def use_memories(self, memories: MemoryPasses) -> None:
        """Requests may begin with prefixes that these stand for."""
        self.memories = memories
        self.lists.allow_gaps()

    def extend(self, forward_batch: Any, requests: list[int]) -> BatchPlan:
        """requests: their rows, which the caller has asked the device for."""
        lengths = [int(n) for n in forward_batch.extend_prefix_lens_cpu]
        q_indptr = indptr(forward_batch.extend_seq_lens_cpu)
        written = forward_batch.out_cache_loc
        prefill = None
        if self.pool.state is not None:
            prefill = PrefillRows(q_indptr, tuple(lengths), written)
        every = zip(requests, self._rows(requests, lengths), pairwise(q_indptr), strict=True)
        rows = [self.lists.begin(one, row, written[a:b]) for one, row, (a, b) in every]
        tails: Sequence[torch.Tensor] = ()
        if self.windows is not None:
            tails = self.windows.tails(rows, self.lists.begins(requests))
        lists = None
        if self.lists.has_packed(requests):
            dense = [row.numel() for row in rows]
            lists = self.lists.prefixes(forward_batch.req_pool_indices, dense)
            rows = [row[:0] for row in rows]
        prefixes = self.kernels.plan(torch.cat(rows), indptr(row.numel() for row in rows))
        memory = None if self.memories is None else self.memories.extend(forward_batch)
        return BatchPlan(written, q_indptr, lists, prefixes, prefill, memory=memory, tails=tails)

    def follow_moved(self, forward_batch: Any) -> None:
        """Write again, before a decoding pass, the rows that have other slots than their lists say.
        It asks the device only where there are some."""
        if not self.pool.moved:
            return
        requests, lengths = forward_batch.req_pool_indices, forward_batch.seq_lens
        for request, length in zip(requests.tolist(), lengths.tolist(), strict=True):
            if length and request in self.pool.moved:
                (row,) = self._rows([request], [length - 1])
                self.lists.begin(request, row, row[:0])

    def decode(self, forward_batch: Any, *, recorded: bool = False) -> BatchPlan:
        """recorded: by a CUDA graph, which asks nothing of the host."""
        if not recorded:
            self.follow_moved(forward_batch)
        written, windows = forward_batch.out_cache_loc, None
        requests, lengths = forward_batch.req_pool_indices, forward_batch.seq_lens
        lists = self.lists.grown(requests, lengths, written, recorded=recorded)
        if self.windows is not None:
            dense = self.lists.dense(requests, lengths)
            windows = self.windows.plan(dense, recorded=recorded)
        memory = None
        if self.memories is not None:
            memory = self.memories.decode(forward_batch, recorded=recorded)
        return BatchPlan(written, lists=lists, memory=memory, windows=windows)

    def verify(self, forward_batch: Any) -> BatchPlan:
        """Drafts over prefixes that are as long as the batch says."""
        # The drafts of the step before that were accepted are where their positions are.
        requests = forward_batch.req_pool_indices.tolist()
        rows = self._rows(requests, [int(n) for n in forward_batch.seq_lens_cpu])
        for request, row in zip(requests, rows, strict=True):
            self.lists.begin(request, row, row[:0])
        lists = self.lists.before(forward_batch.req_pool_indices, forward_batch.seq_lens)
        masks = tree_masks(forward_batch)
        return BatchPlan(forward_batch.out_cache_loc, lists=lists, drafts=masks)

    def _rows(self, requests: list[int], lengths: list[int]) -> list[torch.Tensor]:
        """Each request's token slots."""
        return [
            self.req_to_token[request, :length].to(torch.int64)
            for request, length in zip(requests, lengths, strict=True)
        ]


def warm_up(
    kernels: AttentionKernels,
    pool: HeadPagedKVPool,
    *,
    dtype: torch.dtype,
    chunk: int,
    context: int,
) -> None:
    """Call every kind of pass once before there are requests, so that none waits for compiling.

    On a GPU, Triton takes a second or more to compile a variant of a kernel when it is first
    called, and cuDNN prepares each new shape. What more decoding needs is compiled when CUDA graphs
    are captured. This extends over the entry in the padding slot, as a token and as a list, decodes
    over the list, and writes nothing into the pool.

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
    tables = blank_tables(pool, 1, 1)
    row = tables.slots[0]
    plan = kernels.lists.plan(tables, row, row + 1, pool.layer_num, pool.head_num)
    none = kernels.lists.plan(tables, row, row, pool.layer_num, pool.head_num)
    for cells, over in ((pool.cells, plan), (pool.coded_cells, none)):
        if cells is not None:
            kernels.lists.extend(q[:1], (0, 1), cells, over, 0, 1.0)
            kernels.lists.decode(q[:1], cells, over, 0, 1.0)


def indptr(lengths: Iterable[int]) -> tuple[int, ...]:
    """Return where each of so many rows begins, and where the last ends."""
    return (0, *accumulate(int(length) for length in lengths))

"""Attention over packed spans (pool/packed.py), in which every head has entries of its own.

To a kernel each head of each request is a request with one head, over the pool's cells:

    request 0, head 0     cells  4 17 30 31
    request 0, head 1     cells 90
    request 1, head 0     cells  8 12

A decoding pass attends to ordinary entries and to packed ones apart and merges both states; what is
packed stays the same from token to token, so it is planned again
only when the batch changes. An extend pass plans both together, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from kvtier_kernels import AttentionKernels, AttentionState, RaggedKV
from kvtier_sglang.pool.kv_pool import HeadSplitKVPool
from kvtier_sglang.pool.packed import PackedSpan


class PackedPlan:
    """The packed spans of a batch. spans: of each request, in order. Used by one thread."""

    def __init__(
        self,
        kernels: AttentionKernels,
        pool: HeadSplitKVPool,
        spans: tuple[tuple[PackedSpan, ...], ...],
    ) -> None:
        assert pool.packed is not None, "a pool that does not pack"
        self.kernels, self.pool, self.spans = kernels, pool, spans
        self._cells = pool.packed.cells
        self._kv = RaggedKV(self._cells.k, self._cells.v)
        unique = {span for request in spans for span in request}
        self._of_span = {span: (span.cells(self._cells), span.indptr) for span in unique}
        sizes = [len(buffers.heads) for buffers in pool.ca]
        self._columns = list(pairwise((0, *accumulate(sizes))))
        self._plans: dict[int, Any] = {}

    def decode(self, index: int, q: torch.Tensor, scale: float) -> AttentionState:
        """One query per request over its packed entries of the pool's `index`-th layer.

        q: `[requests, CA heads, group, dim]`; so is the state.
        """
        if index not in self._plans:
            rows = [self._entries(request, column) for request, column in self._pairs(index)]
            self._plans[index] = self._plan(rows)
        o, lse = self.kernels.decode(
            q.flatten(0, 1).unsqueeze(1), self._kv, self._plans[index], scale
        )
        return AttentionState(o.view(q.shape), lse.view(q.shape[:-1]))

    def extend(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_indptr: Sequence[int],
        dense: Sequence[torch.Tensor],
        scale: float,
    ) -> torch.Tensor:
        """New tokens over all entries of their requests and, causally, themselves.

        q: `[tokens, CA heads, group, dim]`; k, v: `[tokens, CA heads, dim]`; dense: each request's
        ordinary slots. Returns the output, shaped like q.
        """
        heads = q.shape[1]
        rows = [
            torch.cat([
                self._cells.of(slice(column, column + 1), dense[request])[0],
                self._entries(request, column),
            ])
            for request, column in self._pairs(index)
        ]  # fmt: skip
        order = _by_head(q_indptr, heads, q.device)
        lengths = [stop - begin for begin, stop in pairwise(q_indptr) for _ in range(heads)]
        single_q, single_k, single_v = (x.flatten(0, 1)[order].unsqueeze(1) for x in (q, k, v))
        state = self.kernels.extend(
            single_q,
            single_k,
            single_v,
            (0, *accumulate(lengths)),
            self._kv,
            self._plan(rows),
            scale,
        )
        out = torch.empty_like(q)
        out.view(-1, *q.shape[2:])[order] = state.o.squeeze(1)
        return out

    def _pairs(self, index: int) -> list[tuple[int, int]]:
        """Each request with each column of a layer."""
        columns = range(*self._columns[index])
        return [(request, column) for request in range(len(self.spans)) for column in columns]

    def _entries(self, request: int, column: int) -> torch.Tensor:
        """The cells of a request's packed entries in a column."""
        parts = []
        for span in self.spans[request]:
            cells, indptr = self._of_span[span]
            parts.append(cells[indptr[column] : indptr[column + 1]])
        return torch.cat(parts) if parts else self._cells.bases[:0]

    def _plan(self, rows: list[torch.Tensor]) -> Any:
        indptr = (0, *accumulate(row.numel() for row in rows))
        return self.kernels.plan(torch.cat(rows), indptr)


def _by_head(q_indptr: Sequence[int], heads: int, device: torch.device) -> torch.Tensor:
    """Rows of `[tokens * heads]` in the order request, head, token."""
    parts = []
    for begin, stop in pairwise(q_indptr):
        token = torch.arange(begin, stop, device=device)
        head = torch.arange(heads, device=device).unsqueeze(1)
        parts.append((token * heads + head).flatten())
    return torch.cat(parts)


__all__ = ["PackedPlan"]

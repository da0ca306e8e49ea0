"""The tables that requests read: lists of entries, one row each.

    row of a request    words of column 0, 1, 2 …      of all packed spans of its prefix, joined;
                                                       those of coded pages in a table of their own
                        slots 7 8 9 31 32 …            of its dense tokens: all that is not packed

A row is written when a request's prefill plans a pass, from its slots and spans, and again where it
gets other slots later (`HeadPagedKVPool.moved`). After that its dense tokens grow by one a step,
which is noted on the device: so a decoding pass asks nothing of the host, and CUDA graphs record
it. The tables stay where they are. Where every token has a slot, SGLang's own table says which.

The last row is that of requests that only fill up a batch: they have nothing. Forward thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kvtier_kernels import AttentionKernels, AttentionState
from kvtier_kernels.lists import ListTables
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool
from kvtier_sglang.pool.packed import PackedSpan


class ListPlans(NamedTuple):
    """The plans that a batch attends over: those of its entries, and of its codes where there are
    any."""

    entries: Any
    codes: Any = None


class Dense(NamedTuple):
    """The dense tokens of a pass's requests.

    slots:  int32 `[rows, width]`, a table of them
    rows:   `[requests]`, of each request
    counts: `[requests]`, how many it has
    begins: `[requests]`, how many of them stand before one that is not dense
    """

    slots: torch.Tensor
    rows: torch.Tensor
    counts: torch.Tensor
    begins: torch.Tensor


class RequestLists:
    """See the module docstring. req_to_token: SGLang's table, int32 `[rows, width]`."""

    def __init__(
        self, kernels: AttentionKernels, pool: HeadPagedKVPool, req_to_token: torch.Tensor
    ) -> None:
        self._kernels, self._pool, self._packed = kernels.lists, pool, pool.packed
        self._merge = kernels.merge_states
        self._cells, self._coded_cells = pool.cells, pool.coded_cells
        rows = len(req_to_token)
        self._blank = torch.tensor([rows], device=pool.device)
        self.tables = replace(blank_tables(pool, rows + 1, 0), slots=req_to_token)
        # Lists of coded pages.
        self.coded = blank_tables(pool, rows + 1, 1)
        # True once tokens of a request may have no slot.
        self._has_gaps = False
        # The number of each row's tokens that are not dense.
        self._packed_tokens = torch.zeros(rows + 1, dtype=torch.int32, device=pool.device)
        # The number of each row's dense tokens before the last of those, where somebody asks.
        self._begins = torch.zeros_like(self._packed_tokens)
        self.finds_gaps = False
        # The words of rows, which the tables only point to, and the spans that they are of.
        self._words: dict[int, torch.Tensor] = {}
        self._codes: dict[int, torch.Tensor] = {}
        self._spans: dict[int, tuple[PackedSpan, ...]] = {}
        # The plans of the last decoding pass, keyed by the number of its requests: the next may be
        # like it.
        self._last: dict[int, ListPlans] = {}
        # The plans of CUDA graphs, keyed likewise.
        self._of_graphs: dict[int, ListPlans] = {}
        if pool.packed is not None:
            self.allow_gaps()

    def allow_gaps(self) -> None:
        """Tokens of a request may have no slot: what compression took, or a memory stands for."""
        if not self._has_gaps:
            rows, width = self.tables.slots.shape
            slots = self.tables.slots.new_zeros(rows + 1, width)
            self.tables, self._has_gaps = replace(self.tables, slots=slots), True

    def begin(self, row: int, slots: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """A request's row, before a pass. slots: int64 `[tokens]` of its prefix, 0 where
        compression took one; new: those of the pass. Returns the slots of the prefix's dense
        tokens."""
        self._last = {}
        self._pool.moved.discard(row)
        if not self._has_gaps:
            return slots
        dense = slots if self._packed is None else self._packed.dense_of[slots]
        is_dense = dense > 0
        dense = dense[is_dense]
        count = dense.numel()
        self.tables.slots[row, :count] = dense
        self.tables.slots[row, count : count + new.numel()] = new
        self._packed_tokens[row : row + 1].fill_(slots.numel() - count)
        if self.finds_gaps:
            self._begins[row].copy_(before_the_last_gap(is_dense))
        spans = () if self._packed is None else self._packed.in_row(slots)
        if spans != self._spans.get(row, ()):
            plain = [span for span in spans if span.coded is None]
            self._join(self.tables, self._words, row, plain)
            self._join(self.coded, self._codes, row, [one for one in spans if one.coded])
            self._spans[row] = spans
        return dense

    def _join(
        self,
        tables: ListTables,
        known: dict[int, torch.Tensor],
        row: int,
        spans: Sequence[PackedSpan],
    ) -> None:
        """Write the row's words of these spans, list by list."""
        if not spans:
            tables.pages[row].zero_()
            known.pop(row, None)
            return
        words = torch.cat([span.words for span in spans])
        column = torch.cat([span.column for span in spans])
        order = torch.argsort(column, stable=True)
        pages = torch.zeros_like(tables.words[row])
        pages.index_add_(0, column, torch.ones_like(column))
        words = words[order]
        tables.words[row] = 4 * (pages.cumsum(0) - pages) + words.data_ptr()
        tables.pages[row] = pages
        # Only now may the words before be freed: passes under way read them.
        known[row] = words

    def has_packed(self, rows: Sequence[int]) -> bool:
        """Return whether any of these rows has packed spans."""
        return any(self._spans.get(row) for row in rows)

    def prefixes(self, rows: torch.Tensor, dense: Sequence[int]) -> ListPlans:
        """A plan over what `begin` was told of: the prefixes of a pass."""
        tokens = torch.tensor(dense, dtype=torch.int32).to(rows.device)
        return self._plan(rows, tokens, None, codes=bool(self._codes))

    def grown(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        newest: torch.Tensor,
        *,
        recorded: bool = False,
    ) -> ListPlans:
        """A plan of a decoding pass. rows, lengths: `[requests]`, lengths with the newest token,
        whose slots are `newest`; a length of 0 where a request only fills up the batch. recorded:
        by a CUDA graph of so many requests, whose plan stays where it is."""
        at, dense = rows.numel(), lengths
        known = self._of_graphs if recorded else self._last
        codes = self._coded_cells is not None if recorded else bool(self._codes)
        if self._has_gaps:
            rows, dense = self._dense(rows, lengths)
            self.tables.slots[rows, (dense - 1).clamp_min(0)] = newest.to(torch.int32)
        plan = self._plan(rows, dense, known.get(at), codes=codes)
        if not recorded:
            known.clear()
        known[at] = plan
        return plan

    def _dense(
        self, rows: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.where(lengths > 0, rows, self._blank)
        return rows, (lengths - self._packed_tokens[rows]).clamp_min(0)

    def dense(self, rows: torch.Tensor, lengths: torch.Tensor) -> Dense:
        """The dense tokens of requests, as `grown` has planned them."""
        if not self._has_gaps:
            return Dense(self.tables.slots, rows, lengths, torch.zeros_like(lengths))
        rows, counts = self._dense(rows, lengths)
        return Dense(self.tables.slots, rows, counts, self._begins[rows])

    def begins(self, rows: Sequence[int]) -> torch.Tensor:
        """Return how many dense tokens of each row stand before one that is not."""
        return self._begins[list(rows)]

    def before(self, rows: torch.Tensor, lengths: torch.Tensor) -> ListPlans:
        """A plan over so many tokens of each request, which its row has."""
        dense = lengths - self._packed_tokens[rows]
        return self._plan(rows, dense, None, codes=bool(self._codes))

    def _plan(
        self, rows: torch.Tensor, dense: torch.Tensor, into: ListPlans | None, *, codes: bool
    ) -> ListPlans:
        """codes: whether lists of codes are planned, too."""
        shape = self._pool.layer_num, self._pool.head_num
        before = into or ListPlans(None)
        entries = self._kernels.plan(self.tables, rows, dense, *shape, before.entries)
        if not codes:
            return ListPlans(entries)
        none = torch.zeros_like(dense)
        return ListPlans(entries, self._kernels.plan(self.coded, rows, none, *shape, before.codes))

    def decode(self, q: torch.Tensor, plans: ListPlans, layer: int, scale: float) -> AttentionState:
        """See ListKernels.decode."""
        state = self._kernels.decode(q, self._cells, plans.entries, layer, scale)
        if plans.codes is None or self._coded_cells is None:
            return state
        codes = self._kernels.decode(q, self._coded_cells, plans.codes, layer, scale)
        return self._merge(state, codes)

    def extend(
        self,
        q: torch.Tensor,
        q_indptr: Sequence[int],
        plans: ListPlans,
        layer: int,
        scale: float,
    ) -> AttentionState:
        """See ListKernels.extend."""
        state = self._kernels.extend(q, q_indptr, self._cells, plans.entries, layer, scale)
        if plans.codes is None or self._coded_cells is None:
            return state
        codes = self._kernels.extend(q, q_indptr, self._coded_cells, plans.codes, layer, scale)
        return self._merge(state, codes)


def blank_tables(pool: HeadPagedKVPool, rows: int, width: int) -> ListTables:
    """Tables of so many rows without entries, with room for so many dense tokens each."""
    shape = rows, pool.layer_num * pool.head_num
    words = torch.zeros(shape, dtype=torch.int64, device=pool.device)
    slots = torch.zeros(rows, width, dtype=torch.int32, device=pool.device)
    return ListTables(words, words.to(torch.int32), slots)


def before_the_last_gap(is_dense: torch.Tensor) -> torch.Tensor:
    """Return how many tokens are dense before the last one that is not; 0 where all are. is_dense:
    bool `[tokens]`. It asks the device for nothing."""
    behind = is_dense.flip(0).int().cumprod(0).sum()
    return is_dense.sum() - behind


def table_bytes(configurator: Any) -> int:
    """Bytes of the dense slots of as many requests, of the longest context, as a CUDA graph of
    decoding serves; 0 where there are no graphs."""
    from sglang.srt.runtime_context import get_exec

    if not str(configurator.device).startswith("cuda"):
        return 0
    decode = get_exec().graph.cuda_graph_config.decode
    if decode.backend == "disabled":
        return 0
    requests = max(decode.bs or [decode.max_bs or 0])
    return int(requests * configurator.model_config.context_len * torch.int32.itemsize)

"""The kernel contract, third part: attention over lists of entries in pages.

All KV of a rank lies in two buffers, `k, v [cells, dim]`. A *column* is one KV head of one layer,
column `layer * heads + head`:

    column c    cells c * column_cells ... : one for every token slot of the pool
    page        16 cells from a multiple of 16 on, all of one column's memory
    word        int32, a page and how many entries it has: page << 5 | entries (0 to 16);
                page << 6 | entries of a coded page (kvtier_kernels.codes)

A token that nothing has compressed, a *dense* one, has the same slot in every column. What is left
of a compressed part of a context is *lists*: every column keeps entries of its own, in pages that
may stand in any column's memory. So a request's list of a KV head is

    word word word ... | token token token ...
    this column's own    dense, by slot: the same in all columns

and the order of its entries means nothing. A plan says how such lists are cut for the device. It
depends on numbers at fixed addresses only, so that a CUDA graph replays it while lists grow. Lists
of coded pages are lists by themselves, without dense tokens: who has both merges two states.

Ownership: a plan keeps the tables that it was made of, and reads them whenever it is used: who
changes them plans again (`into` keeps the plan's own addresses), in the same stream. Thread safety:
one thread and one stream per plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvtier_kernels.states import AttentionState

PAGE_CELLS = 16
# The number of bits of a word that hold the number of entries of its page.
ENTRY_BITS = 5


@dataclass(frozen=True)
class ListTables:
    """The lists of a batch, on the device; a request has a row.

    words: int64 [rows, columns], the address (`data_ptr`) of the first word of each list; not read
           where a list has none.
    pages: int32 [rows, columns], words of each list.
    slots: int32 [rows, width], the dense tokens' slots of each row, from its first place on.

    All are contiguous.
    """

    words: torch.Tensor
    pages: torch.Tensor
    slots: torch.Tensor


class CellKV(NamedTuple):
    """The KV of a rank.

    k, v:         [cells, dim], contiguous, in the query's dtype or one that converts to it (fp8).
    column_cells: cells of a column.
    log_votes:    float32 added to the logits of an entry in a page (KeepKV: ln p), contiguous:
                  [cells], or [cells, group] where every query head has its own; None when every
                  entry stands for exactly one token. No query sees an entry with -inf. A dense
                  token has no votes: what is there for its cell has to be 0, and backends need not
                  read it. Where a query's `group` is that of several tokens (drafts), token by
                  token, row g has the votes of query head g % log_votes.shape[1].
    bits:         of the codes of coded pages, whose entries have no votes; None where pages are not
                  coded.
    """

    k: torch.Tensor
    v: torch.Tensor
    column_cells: int
    log_votes: torch.Tensor | None = None
    bits: int | None = None

    @property
    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v as bytes, uint8 [pages, bytes]: views."""
        sides = (x.view(torch.uint8).view(len(x) // PAGE_CELLS, -1) for x in (self.k, self.v))
        k, v = sides
        return k, v


class ListKernels(ABC):
    """One backend of the contract in this module's docstring."""

    @abstractmethod
    def plan(
        self,
        tables: ListTables,
        rows: torch.Tensor,
        dense: torch.Tensor,
        layers: int,
        heads: int,
        into: Any = None,
    ) -> Any:
        """A plan for `decode` and `extend` of all layers. See `AttentionKernels.plans_on_device`.

        rows:  [requests] int32 or int64, each request's row.
        dense: [requests] int32 or int64, how many dense tokens each has.
        heads: KV heads of a layer; the tables have layers * heads columns.
        into:  an earlier plan of as many requests, layers and heads, to fill again: the words of
               rows that both have are still the same, and what it has on the device stays where it
               is. A CUDA graph that records this plans at every replay, from tables, rows and dense
               at the same addresses. It is filled for whatever shapes of queries it was used with:
               use it once before recording, and for extending, where they change, make plans anew.
        """

    @abstractmethod
    def decode(
        self, q: torch.Tensor, kv: CellKV, plan: Any, layer: int, scale: float
    ) -> AttentionState:
        """One query per request over its lists of a layer.

        q: [requests, heads, group, dim]; group may have the rows of several tokens (drafts), up to
        128. scale multiplies q.k. The state is empty where a list is.
        """

    @abstractmethod
    def extend(
        self,
        q: torch.Tensor,
        q_indptr: Sequence[int],
        kv: CellKV,
        plan: Any,
        layer: int,
        scale: float,
    ) -> AttentionState:
        """New tokens of each request over all entries of its lists, not over each other.

        q: [tokens, heads, group, dim]; request i owns the rows q_indptr[i]:q_indptr[i + 1].
        """

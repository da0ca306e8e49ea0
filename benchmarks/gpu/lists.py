"""Contexts whose KV heads hold different entries, as lists in pages: for measuring kernels.

column     slots of dense tokens | pages
list       its words' pages, from anywhere in the pages of all columns
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtier_kernels import AttentionKernels, CellKV, ListTables
from kvtier_kernels.lists import ENTRY_BITS, PAGE_CELLS


@dataclass(frozen=True)
class Contexts:
    """A batch, with KV of its own in every layer. Request i has row i of the tables.

    words:  what the tables point to
    packed: entries in pages, of each request's heads; the same in all layers
    dense:  [requests] int32
    """

    kv: CellKV
    tables: ListTables
    words: torch.Tensor
    packed: Sequence[Sequence[int]]
    dense: torch.Tensor
    layers: int

    @property
    def requests(self) -> int:
        return len(self.packed)

    @property
    def heads(self) -> int:
        return len(self.packed[0])

    @property
    def num_bytes(self) -> int:
        """The bytes of one layer's entries."""
        entries = sum(map(sum, self.packed)) + self.heads * int(self.dense.sum())
        return 2 * entries * self.kv.k.shape[1] * self.kv.k.itemsize

    def planned_by(self, kernels: AttentionKernels, into: Any = None) -> Any:
        rows = torch.arange(self.requests, device=self.dense.device)
        return kernels.lists.plan(self.tables, rows, self.dense, self.layers, self.heads, into)

    def of(self, layer: int, request: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[entries, dim]` of a list."""
        column = layer * self.heads + head
        place = torch.arange(PAGE_CELLS, device=self.words.device)
        begin = int(self.tables.words[request, column] - self.words.data_ptr()) // 4
        words = self.words[begin : begin + int(self.tables.pages[request, column])].long()[:, None]
        packed = (words >> ENTRY_BITS) * PAGE_CELLS + place
        dense = self.tables.slots[request, : int(self.dense[request])].long()
        inside = place < words % (1 << ENTRY_BITS)
        cells = torch.cat([packed[inside], column * self.kv.column_cells + dense])
        return self.kv.k[cells], self.kv.v[cells]


def make_contexts(
    packed: Sequence[Sequence[int]],
    dense: Sequence[int],
    *,
    layers: int,
    dim: int,
    dtype: torch.dtype,
    device: str,
    seed: int,
    voted: bool = False,
    run: int | None = None,
) -> Contexts:
    """Random KV. packed: as Contexts has it; dense: tokens of each request; voted: with a vote for
    every entry in a page; run: so many neighbours of a list lie together, as an allocator leaves
    them; None: all of them."""
    generator = torch.Generator(device).manual_seed(seed)
    requests, heads = len(packed), len(packed[0])
    entries = torch.tensor(packed, device=device).expand(layers, requests, heads)
    pages = -(-entries // PAGE_CELLS)
    # The pages of each column: dense ones, and its own.
    dense_pages = -(-sum(dense) // PAGE_CELLS)
    own_pages = dense_pages + -(-int(pages.sum()) // (layers * heads))
    free = torch.arange(layers * heads * own_pages, device=device).view(-1, own_pages)
    free = _in_runs(free[:, dense_pages:].flatten(), run and run // PAGE_CELLS, generator)
    ends = pages.flatten().cumsum(0)
    fill = torch.full_like(free[: int(ends[-1])], PAGE_CELLS)
    some = pages.flatten() > 0
    fill[ends[some] - 1] -= (pages * PAGE_CELLS - entries).flatten()[some]
    words = (free[: len(fill)] << ENTRY_BITS | fill).int()
    begins = (ends - pages.flatten()).view_as(pages)
    slots = _in_runs(torch.arange(sum(dense), device=device), run, generator).int()
    table = torch.zeros(requests, max(1, *dense), dtype=torch.int32, device=device)
    for row, own in zip(table, torch.split(slots, list(dense)), strict=True):
        row[: len(own)] = own
    tables = ListTables(
        words=(begins * 4 + words.data_ptr()).transpose(0, 1).flatten(1),
        pages=pages.transpose(0, 1).flatten(1).int(),
        slots=table,
    )
    shape = (layers * heads * own_pages * PAGE_CELLS, dim)
    k, v = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in "kv")
    votes = None
    if voted:
        votes = torch.rand(shape[0], generator=generator, device=device)
        votes.view(layers * heads, -1)[:, : dense_pages * PAGE_CELLS] = 0
    kv = CellKV(k, v, own_pages * PAGE_CELLS, votes)
    counts = torch.tensor(dense, dtype=torch.int32, device=device)
    return Contexts(kv, tables, words, packed, counts, layers)


def _in_runs(x: torch.Tensor, run: int | None, generator: torch.Generator) -> torch.Tensor:
    """x `[n]` in runs of so many neighbours, which are in no order; the rest comes last."""
    if run is None:
        return x
    whole = x[: len(x) // run * run].view(-1, run)
    order = torch.randperm(len(whole), generator=generator, device=x.device)
    return torch.cat([whole[order].flatten(), x[whole.numel() :]])

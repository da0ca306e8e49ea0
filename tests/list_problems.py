"""Lists of entries in pages for tests of kernels, and what they say written out."""

import itertools
from dataclasses import dataclass

import torch

from kvtier_kernels import CellKV, ListTables

LAYERS, HEADS = 2, 3
PAGES_PER_COLUMN = 40
COLUMN_CELLS = 16 * PAGES_PER_COLUMN
# The lists of every request by layer and head, and its dense tokens: none of either, one entry,
# ends in the middle of a page, one list far longer than the others.
ENTRIES = [[[0, 0, 0], [0, 0, 0]], [[1, 37, 0], [5, 0, 16]], [[300, 20, 3], [0, 90, 160]]]
DENSE = [0, 21, 45]


@dataclass
class Problem:
    """The content of tables, written out: cells[request][layer][head] of all entries."""

    kv: CellKV
    tables: ListTables
    rows: torch.Tensor
    dense: torch.Tensor
    arena: torch.Tensor
    cells: list

    def grow(self):
        """Every request gets a dense token more; its slot is in the table already."""
        self.dense += 1
        self.cells = [
            [
                [
                    torch.cat([own, column_of(layer, head) + self.tables.slots[row, n - 1 : n]])
                    for head, own in enumerate(of_layer)
                ]
                for layer, of_layer in enumerate(of_request)
            ]
            for of_request, row, n in zip(
                self.cells, self.rows.tolist(), self.dense.tolist(), strict=True
            )
        ]


def column_of(layer, head):
    return (layer * HEADS + head) * COLUMN_CELLS


def make_problem(kv_dtype=torch.float32, dim=64, votes=(), seed=0, entries=ENTRIES, dense=DENSE):
    """Lists of random pages of all columns, and dense tokens of random slots; rows in no order.

    votes: the shape of an entry's in a page; None for no votes.
    """
    g = torch.Generator("cpu").manual_seed(seed)
    columns, requests = LAYERS * HEADS, len(dense)
    cells = columns * COLUMN_CELLS
    k, v = (torch.randn(cells, dim, generator=g, device="cpu").to(kv_dtype) for _ in "kv")
    log_votes = None if votes is None else torch.randn(cells, *votes, generator=g, device="cpu")
    # The last pages of every column are of dense tokens, the others of any column's lists.
    width = 64
    first_dense = COLUMN_CELLS - requests * width
    assert first_dense % 16 == 0
    if log_votes is not None:
        log_votes.view(columns, COLUMN_CELLS, *votes)[:, first_dense:] = 0
    slots = first_dense + torch.randperm(requests * width, generator=g, device="cpu")
    of_lists = torch.arange(cells // 16, device="cpu").view(columns, -1)[:, : first_dense // 16]
    free = of_lists.flatten()[torch.randperm(of_lists.numel(), generator=g, device="cpu")].tolist()
    order = torch.randperm(requests + 2, generator=g, device="cpu")[:requests]
    table = torch.zeros(requests + 2, width, dtype=torch.int32, device="cpu")
    pages = torch.zeros(requests + 2, columns, dtype=torch.int32, device="cpu")
    begins = torch.zeros(requests + 2, columns, dtype=torch.int64, device="cpu")
    words, written = [], []
    for i, row in enumerate(order.tolist()):
        table[row] = slots[i * width : (i + 1) * width]
        written.append([[None] * HEADS for _ in range(LAYERS)])
        for layer, head in itertools.product(range(LAYERS), range(HEADS)):
            left, own = entries[i][layer][head], []
            begins[row, layer * HEADS + head] = len(words)
            while left:
                # Some pages are not full, as where a span ended.
                fill = min(left, 16 if left % 3 else 7)
                page = free.pop()
                words.append(page << 5 | fill)
                own += range(page * 16, page * 16 + fill)
                left -= fill
            if len(own) > 50:
                words.append(free.pop() << 5)
            pages[row, layer * HEADS + head] = len(words) - begins[row, layer * HEADS + head]
            own += (column_of(layer, head) + table[row, : dense[i]]).tolist()
            written[i][layer][head] = torch.tensor(own, dtype=torch.int64)
    arena = torch.tensor(words, dtype=torch.int32)
    tables = ListTables(begins.to(arena.device) * 4 + arena.data_ptr(), *on(arena, pages, table))
    log_votes = None if log_votes is None else log_votes.to(arena.device)
    kv = CellKV(*on(arena, k, v), COLUMN_CELLS, log_votes)
    tokens = torch.tensor(dense, dtype=torch.int32)
    return Problem(kv, tables, *on(arena, order), tokens, arena, written)


def on(like, *tensors):
    return [x.to(like.device) for x in tensors]

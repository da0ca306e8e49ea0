"""Attention over lists in pages, in PyTorch: dense tokens with one product over all heads, as over
any slot table, and what else a list has by itself. Planned on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from kvtier_kernels.base import RaggedKV
from kvtier_kernels.lists import (
    ENTRY_BITS,
    PAGE_CELLS,
    CellKV,
    ListKernels,
    ListTables,
    check_tables,
)
from kvtier_kernels.reference_backend.products import concat, over_entries
from kvtier_kernels.reference_backend.slots import RequestSlots, plan_request
from kvtier_kernels.states import AttentionState, empty_state, merge_states

_NONE = torch.empty(0, 1, dtype=torch.int64)


@dataclass(frozen=True)
class RequestLists:
    """dense: slots. cells: of every column's words, in runs where pages follow each other."""

    dense: RequestSlots
    cells: tuple[RequestSlots, ...]


@dataclass(frozen=True)
class ReferenceListPlan:
    """rows: of the tables, each request's."""

    requests: tuple[RequestLists, ...]
    rows: tuple[int, ...]
    heads: int


class ReferenceLists(ListKernels):
    def plan(
        self,
        tables: ListTables,
        rows: torch.Tensor,
        dense: torch.Tensor,
        layers: int,
        heads: int,
        into: Any = None,
    ) -> ReferenceListPlan:
        check_tables(tables, rows, dense, layers, heads)
        # What an earlier plan found in the same rows, whose words are still the same.
        known = {} if into is None else dict(zip(into.rows, into.requests, strict=True))
        asked, requests = tuple(rows.tolist()), []
        for row, tokens in zip(asked, dense.tolist(), strict=True):
            slots = plan_request(tables.slots[row, :tokens].long(), None)
            cells = known[row].cells if row in known else _cells(tables, row)
            requests.append(RequestLists(slots, cells))
        return ReferenceListPlan(tuple(requests), asked, heads)

    def decode(
        self, q: torch.Tensor, kv: CellKV, plan: ReferenceListPlan, layer: int, scale: float
    ) -> AttentionState:
        return self.extend(q, range(len(q) + 1), kv, plan, layer, scale)

    def extend(
        self,
        q: torch.Tensor,
        q_indptr: Sequence[int],
        kv: CellKV,
        plan: ReferenceListPlan,
        layer: int,
        scale: float,
    ) -> AttentionState:
        columns = range(layer * plan.heads, (layer + 1) * plan.heads)
        of_layer = _layer(kv, columns, q.shape[2])
        states = [empty_state(q[:0])]
        for request, (begin, end) in zip(plan.requests, pairwise(q_indptr), strict=True):
            if begin == end:
                continue
            own = q[begin:end]
            slots = request.dense
            if kv.log_votes is not None and slots.num_entries:
                slots = RequestSlots((), slots.all_slots, True, slots.all_slots)
            state = over_entries(own, of_layer, slots, scale)
            cells = [request.cells[column] for column in columns]
            if any(each.num_entries for each in cells):
                state = merge_states(state, _over_cells(own, kv, cells, scale))
            states.append(state)
        return concat(states)


def _over_cells(
    q: torch.Tensor, kv: CellKV, cells: Sequence[RequestSlots], scale: float
) -> AttentionState:
    """q [tokens, heads, group, dim] over the cells of each head."""
    votes = kv.log_votes
    if votes is not None and votes.ndim == 2:
        votes = _of_rows(votes, q.shape[2]).unsqueeze(1)
    every = RaggedKV(kv.k.unsqueeze(1), kv.v.unsqueeze(1), votes)
    states = []
    for head, own in enumerate(cells):
        if votes is not None and own.num_entries:
            own = RequestSlots((), own.all_slots, True, own.all_slots)
        states.append(over_entries(q[:, head : head + 1], every, own, scale))
    return AttentionState(
        torch.cat([s.o for s in states], 1), torch.cat([s.lse for s in states], 1)
    )


def _layer(kv: CellKV, columns: range, group: int) -> RaggedKV:
    """A layer's columns as buffers by slot: views, but for votes."""

    def by_slot(x: torch.Tensor) -> torch.Tensor:
        """[slots, heads, ...]"""
        cells = slice(columns.start * kv.column_cells, columns.stop * kv.column_cells)
        by_column = x[cells].view(len(columns), kv.column_cells, *x.shape[1:])
        return by_column.transpose(0, 1)

    votes = kv.log_votes
    if votes is not None:
        votes = by_slot(votes.unsqueeze(1) if votes.ndim == 1 else votes)
        votes = _of_rows(votes, group)
    return RaggedKV(by_slot(kv.k), by_slot(kv.v), votes)


def _of_rows(votes: torch.Tensor, group: int) -> torch.Tensor:
    """Votes [..., query heads] of a group's rows [..., group]: row g has those of g % heads."""
    times = group // votes.shape[-1]
    return votes.unsqueeze(-2).expand(*votes.shape[:-1], times, -1).flatten(-2)


def _cells(tables: ListTables, row: int) -> tuple[RequestSlots, ...]:
    """The cells of each column's entries in a row."""
    device = tables.words.device
    found = []
    for at, pages in zip(tables.words[row].tolist(), tables.pages[row].tolist(), strict=True):
        words = _read(at, pages, device).long().unsqueeze(1) if pages else _NONE.to(device)
        place = torch.arange(PAGE_CELLS, device=device)
        inside = place < words % (1 << ENTRY_BITS)
        found.append(plan_request(((words >> ENTRY_BITS) * PAGE_CELLS + place)[inside], None))
    return tuple(found)


def _read(address: int, words: int, device: torch.device) -> torch.Tensor:
    """int32 [words] as they lie there: not a copy."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_int32 * words).from_address(address), dtype=torch.int32)
    return torch.as_tensor(_Words(address, words), device=device)


class _Words:
    """What another library's arrays look like to PyTorch."""

    def __init__(self, address: int, words: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (words,),
            "typestr": "<i4",
            "version": 3,
        }


__all__ = ["ReferenceLists"]

"""Attention over lists in pages, in PyTorch: dense tokens with one product over all heads, as over
any slot table, and what each list has in pages by itself. Planned on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from kvtier_kernels.base import RaggedKV
from kvtier_kernels.fp8 import take
from kvtier_kernels.lists import (
    ENTRY_BITS,
    PAGE_CELLS,
    CellKV,
    ListKernels,
    ListTables,
    check_tables,
)
from kvtier_kernels.reference_backend.products import (
    GATHERED_ENTRIES,
    concat,
    dense,
    over_entries,
)
from kvtier_kernels.reference_backend.slots import RequestSlots, plan_request
from kvtier_kernels.states import AttentionState, empty_state

# Longer than a run of slots, because a cell is of one head: a short one is cheap to gather.
MIN_RUN_CELLS = 1024
# Rows at a time: the states of all parts are held until they are merged.
MOST_ROWS = 512
_NONE = torch.empty(0, 1, dtype=torch.int64)


@dataclass(frozen=True)
class LayerCells:
    """What the KV heads of a layer have in pages.

    runs:      (head, start, stop): cells that follow each other, read as views
    most_runs: of any head
    gathered:  int64 [heads, entries] each: the other cells of all heads, side by side
    missing:   float32 [heads, entries, 1] for each of these: -inf where a head has fewer
    """

    runs: tuple[tuple[int, int, int], ...]
    most_runs: int
    gathered: tuple[torch.Tensor, ...]
    missing: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, columns: Sequence[RequestSlots]) -> LayerCells:
        """The cells of each head, as runs and others."""
        runs = [(head, *run) for head, own in enumerate(columns) for run in own.runs]
        loose = [_NONE[:, 0] if own.scattered is None else own.scattered for own in columns]
        table = pad_sequence(loose, batch_first=True)
        held = torch.tensor([len(own) for own in loose], device=table.device)
        beyond = torch.arange(table.shape[1], device=table.device) >= held[:, None]
        missing = torch.zeros(beyond.shape, device=table.device).masked_fill_(beyond, float("-inf"))
        return cls(
            tuple(runs),
            max(len(own.runs) for own in columns),
            torch.split(table, GATHERED_ENTRIES, 1) if table.numel() else (),
            torch.split(missing.unsqueeze(-1), GATHERED_ENTRIES, 1) if table.numel() else (),
        )


@dataclass(frozen=True)
class RequestLists:
    """dense: slots. cells: of every column's words. layers: each layer's, once it was asked for."""

    dense: RequestSlots
    cells: tuple[RequestSlots, ...]
    layers: dict[int, LayerCells]

    def layer(self, layer: int, heads: int) -> LayerCells:
        """The cells of a layer's heads."""
        if layer not in self.layers:
            columns = self.cells[layer * heads : (layer + 1) * heads]
            self.layers[layer] = LayerCells.of(columns)
        return self.layers[layer]


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
            slots = plan_request(tables.slots[row, :tokens].long())
            before = known.get(row) or RequestLists(slots, _cells(tables, row), {})
            requests.append(replace(before, dense=slots))
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
        of_layer = _by_slot(kv, columns)
        states = [empty_state(q[:0])]
        for request, (begin, end) in zip(plan.requests, pairwise(q_indptr), strict=True):
            if begin == end:
                continue
            cells = request.layer(layer, plan.heads)
            for own in torch.split(q[begin:end], MOST_ROWS):
                states.append(_state(own, kv, of_layer, request.dense, cells, scale))
        return concat(states)


def _by_slot(kv: CellKV, columns: range) -> RaggedKV:
    """A layer's columns as buffers [slots, heads, dim]: views."""
    cells = slice(columns.start * kv.column_cells, columns.stop * kv.column_cells)
    shape = (len(columns), kv.column_cells, -1)
    return RaggedKV(*(x[cells].view(shape).transpose(0, 1) for x in (kv.k, kv.v)))


def _state(
    q: torch.Tensor,
    kv: CellKV,
    of_layer: RaggedKV,
    dense_slots: RequestSlots,
    cells: LayerCells,
    scale: float,
) -> AttentionState:
    """q [rows, heads, group, dim] over a request's dense tokens and its cells of a layer."""
    votes = kv.log_votes
    if votes is not None and votes.ndim == 1:
        votes = votes.unsqueeze(1)
    first = over_entries(q, of_layer, dense_slots, scale)
    gathered = 1 + len(cells.gathered)
    if gathered + cells.most_runs == 1:
        return first
    # A head with fewer runs than another has empty parts instead.
    o = q.new_zeros(gathered + cells.most_runs, *q.shape)
    lse = torch.full(o.shape[:-1], float("-inf"), device=q.device)
    o[0], lse[0] = first
    for part, (own, missing) in enumerate(zip(cells.gathered, cells.missing, strict=True), 1):
        k, v = (_side_by_side(side, own).to(q.dtype) for side in (kv.k, kv.v))
        seen = missing if votes is None else missing + votes[own]
        o[part], lse[part] = dense(q, k, v, seen, scale)
    runs = [0] * q.shape[1]
    for head, start, stop in cells.runs:
        k, v = (side[start:stop].unsqueeze(1).to(q.dtype) for side in (kv.k, kv.v))
        bias = None if votes is None else votes[start:stop]
        part = gathered + runs[head]
        alone = slice(head, head + 1)
        o[part, :, alone], lse[part, :, alone] = dense(q[:, alone], k, v, bias, scale)
        runs[head] += 1
    total = lse.logsumexp(0)
    shares = torch.nan_to_num((lse - total).exp_()).unsqueeze(-1)
    return AttentionState((o * shares).sum(0).to(q.dtype), total)


def _side_by_side(side: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    """[entries, heads, dim] of cells [heads, entries]: a copy, in a view of which heads are
    second."""
    return take(side, 0, cells.flatten()).view(*cells.shape, -1).transpose(0, 1)


def _cells(tables: ListTables, row: int) -> tuple[RequestSlots, ...]:
    """The cells of each column's entries in a row."""
    device = tables.words.device
    found = []
    for at, pages in zip(tables.words[row].tolist(), tables.pages[row].tolist(), strict=True):
        words = _read(at, pages, device).long().unsqueeze(1) if pages else _NONE.to(device)
        place = torch.arange(PAGE_CELLS, device=device)
        inside = place < words % (1 << ENTRY_BITS)
        cells = ((words >> ENTRY_BITS) * PAGE_CELLS + place)[inside]
        found.append(plan_request(cells, MIN_RUN_CELLS))
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

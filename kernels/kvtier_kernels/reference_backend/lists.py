"""Attention over lists in pages, in PyTorch: dense tokens with one product over all heads, as over
any slot table, and what each list has in pages by itself. Planned on the host. Decoding in float32
on a CPU is compiled where there is numba (kvtier_kernels.reference_backend.compiled)."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch

from kvtier_kernels.base import RaggedKV
from kvtier_kernels.codes import coded_shape, decoded_entries, rotated
from kvtier_kernels.lists import (
    ENTRY_BITS,
    PAGE_CELLS,
    CellKV,
    ListKernels,
    ListTables,
)
from kvtier_kernels.reference_backend.products import concat, dense, over_entries
from kvtier_kernels.reference_backend.slots import RequestSlots, plan_request, positions_of
from kvtier_kernels.states import AttentionState, empty_state, merge_states

try:
    from kvtier_kernels.reference_backend import compiled
except ImportError:
    compiled = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from kvtier_kernels.reference_backend.compiled import HostLists

# Longer than a run of slots, because a page is of one head: a short one is cheap to gather.
MIN_RUN_PAGES = 64
# Rows at a time: the states of all parts are held until they are merged.
MOST_ROWS = 512


@dataclass(frozen=True)
class RequestLists:
    """slots: int32, of the dense tokens. words: int32, of all columns; column c has those from
    starts[c] to starts[c + 1]."""

    slots: torch.Tensor
    words: torch.Tensor
    starts: tuple[int, ...]

    @cached_property
    def dense(self) -> RequestSlots:
        """The dense tokens, as runs and others; of no use to compiled code."""
        return plan_request(self.slots.long())

    def cells(self, column: int) -> torch.Tensor:
        """int64 [entries]: where a column's entries are."""
        return _cells(self._words(column))

    @cached_property
    def in_runs(self) -> tuple[RequestSlots, ...]:
        """The places of each column's entries: runs of whole pages, and scattered others."""
        words, total = self.words.long(), len(self.words)
        if not total:
            return (RequestSlots((), None),) * (len(self.starts) - 1)
        page, count = words >> ENTRY_BITS, words % (1 << ENTRY_BITS)
        whole = count == PAGE_CELLS
        # A stretch of pages begins where a column does, and where a page does not follow the one
        # before it or either is not whole.
        begins = torch.ones_like(whole)
        begins[1:] = (page[1:] != page[:-1] + 1) | ~whole[1:] | ~whole[:-1]
        begins[[start for start in self.starts if start < total]] = True
        bounds = positions_of(begins)
        lengths = torch.diff(bounds, append=bounds.new_tensor([total]))
        is_run = whole[bounds] & (lengths >= MIN_RUN_PAGES)
        runs: list[list[tuple[int, int]]] = [[] for _ in self.starts[1:]]
        ends = torch.stack((bounds, page[bounds], page[bounds] + lengths), 1)[is_run]
        for at, first, stop in ends.tolist():
            column = bisect_right(self.starts, at) - 1
            runs[column].append((first * PAGE_CELLS, stop * PAGE_CELLS))
        loose = ~is_run.repeat_interleave(lengths)
        entries = torch.nn.functional.pad((count * loose).cumsum(0), (1, 0))
        sizes = entries[list(self.starts)].diff().tolist()
        cells = torch.split(_cells(words[loose]), sizes)
        return tuple(
            RequestSlots(tuple(mine), others if len(others) else None)
            for mine, others in zip(runs, cells, strict=True)
        )

    def _words(self, column: int) -> torch.Tensor:
        return self.words[self.starts[column] : self.starts[column + 1]].long()


@dataclass(frozen=True)
class ReferenceListPlan:
    """rows: of the tables, each request's. host: what compiled code reads, once it was asked."""

    requests: tuple[RequestLists, ...]
    rows: tuple[int, ...]
    heads: int
    host: list[HostLists]


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
        # `known` has what an earlier plan found in the same rows, whose words are still the same.
        known = {} if into is None else dict(zip(into.rows, into.requests, strict=True))
        asked, requests = tuple(rows.tolist()), []
        for row, tokens in zip(asked, dense.tolist(), strict=True):
            slots, before = tables.slots[row, :tokens], known.get(row)
            words = _words(tables, row) if before is None else (before.words, before.starts)
            requests.append(RequestLists(slots, *words))
        found = ReferenceListPlan(tuple(requests), asked, heads, [])
        if into is not None and into.rows == asked and into.host:
            found.host.append(into.host[0]._replace(**_dense_on_the_host(requests)))
        return found

    def decode(
        self, q: torch.Tensor, kv: CellKV, plan: ReferenceListPlan, layer: int, scale: float
    ) -> AttentionState:
        is_float32 = q.dtype == kv.k.dtype == torch.float32 and q.device.type == "cpu"
        if compiled is None or not is_float32 or q.shape[2] > compiled.FEW_ROWS:
            return self.extend(q, range(len(q) + 1), kv, plan, layer, scale)
        if not plan.host:
            plan.host.append(_on_the_host(plan.requests))
        if kv.bits is None:
            return compiled.decode(q, kv, plan.host[0], layer, scale)
        found = compiled.decode_codes(rotated(q), kv, plan.host[0], layer, scale)
        return AttentionState(rotated(found.o), found.lse)

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
        if kv.bits is not None:
            return _extend_codes(q, q_indptr, kv, plan, columns, scale)
        of_layer = _by_slot(kv, columns)
        states = [empty_state(q[:0])]
        for request, (begin, end) in zip(plan.requests, pairwise(q_indptr), strict=True):
            if begin == end:
                continue
            cells = request.in_runs[columns.start : columns.stop]
            for own in torch.split(q[begin:end], MOST_ROWS):
                state = over_entries(own, of_layer, request.dense, scale)
                if any(cells):
                    state = merge_states(state, _over_cells(own, kv, cells, scale))
                states.append(state)
        return concat(states)


def _extend_codes(
    q: torch.Tensor,
    q_indptr: Sequence[int],
    kv: CellKV,
    plan: ReferenceListPlan,
    columns: range,
    scale: float,
) -> AttentionState:
    """`ReferenceLists.extend` over coded pages, which are decoded for every head of a request."""
    assert kv.bits is not None, "pages that are not coded"
    shape = coded_shape(kv.bits, q.shape[-1])
    states = [empty_state(q[:0])]
    for request, (begin, end) in zip(plan.requests, pairwise(q_indptr), strict=True):
        if begin == end:
            continue
        own = q[begin:end]
        heads = []
        for head, column in enumerate(columns):
            k, v = decoded_entries(kv.pages, request._words(column), shape, rotate=False)
            mine = own[:, head : head + 1]
            if not len(k):
                heads.append(empty_state(mine))
                continue
            k, v = (x.unsqueeze(1).to(q.dtype) for x in (k, v))
            parts = [
                dense(rotated(some), k, v, None, scale) for some in torch.split(mine, MOST_ROWS)
            ]
            state = concat(parts)
            heads.append(AttentionState(rotated(state.o), state.lse))
        states.append(AttentionState(*(torch.cat(x, 1) for x in zip(*heads, strict=True))))
    return concat(states)


def _by_slot(kv: CellKV, columns: range) -> RaggedKV:
    """A layer's columns as buffers [slots, heads, dim]: views."""
    cells = slice(columns.start * kv.column_cells, columns.stop * kv.column_cells)
    shape = (len(columns), kv.column_cells, -1)
    return RaggedKV(*(x[cells].view(shape).transpose(0, 1) for x in (kv.k, kv.v)))


def _over_cells(
    q: torch.Tensor, kv: CellKV, cells: Sequence[RequestSlots], scale: float
) -> AttentionState:
    """q [rows, heads, group, dim] over each head's own cells."""
    flat = RaggedKV(kv.k.unsqueeze(1), kv.v.unsqueeze(1))
    votes = None if kv.log_votes is None else kv.log_votes.view(len(kv.k), -1)
    states = [
        over_entries(q[:, head : head + 1], flat, own, scale, votes)
        for head, own in enumerate(cells)
    ]
    return AttentionState(*(torch.cat(parts, 1) for parts in zip(*states, strict=True)))


def _cells(words: torch.Tensor) -> torch.Tensor:
    """int64 [entries]: where the entries of these pages are. words: int64."""
    words = words.unsqueeze(1)
    place = torch.arange(PAGE_CELLS, device=words.device)
    return ((words >> ENTRY_BITS) * PAGE_CELLS + place)[place < words % (1 << ENTRY_BITS)]


def _on_the_host(requests: Sequence[RequestLists]) -> HostLists:
    """Return the lists as arrays for compiled code."""
    offsets = (0, *accumulate(len(one.words) for one in requests))
    starts = torch.tensor([one.starts for one in requests])
    return compiled.HostLists(
        words=torch.cat([one.words for one in requests]).numpy(),
        starts=(starts[:, :-1] + torch.tensor(offsets[:-1])[:, None]).numpy(),
        pages=starts.diff(dim=1).numpy(),
        **_dense_on_the_host(requests),
    )


def _dense_on_the_host(requests: Sequence[RequestLists]) -> dict[str, Any]:
    """The part of it that grows with every token."""
    slots = [one.slots for one in requests]
    indptr = torch.tensor((0, *accumulate(map(len, slots))))
    return {"slots": torch.cat(slots).numpy(), "indptr": indptr.numpy()}


def _words(tables: ListTables, row: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The words of all columns of a row, and where each column's begin."""
    device, pages = tables.words.device, tables.pages[row].tolist()
    lists = zip(tables.words[row].tolist(), pages, strict=True)
    found = [_read(at, count, device) for at, count in lists if count]
    none = torch.empty(0, dtype=torch.int32, device=device)
    return torch.cat([none, *found]), (0, *accumulate(pages))


def _read(address: int, words: int, device: torch.device) -> torch.Tensor:
    """int32 [words] as they lie there: not a copy."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_int32 * words).from_address(address), dtype=torch.int32)
    return torch.as_tensor(_Words(address, words), device=device)


class _Words:
    """An array of words at an address, in the form in which PyTorch takes another library's
    arrays."""

    def __init__(self, address: int, words: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (words,),
            "typestr": "<i4",
            "version": 3,
        }

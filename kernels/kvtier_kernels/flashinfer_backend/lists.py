"""Lists of entries in pages as FlashInfer reads them: each list is a request with one KV head.

    request 0, head 0 | cells of its words, cells of its dense tokens |   a page of one entry each
    request 0, head 1 | ...

Where spans were joined, pages in the middle of a list are not full, which FlashInfer has no word
for: so its pages are single cells, listed layer by layer when a layer first asks. Planned on the
host, as all that FlashInfer does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch

from kvtier_kernels.base import RaggedKV
from kvtier_kernels.flashinfer_backend.limits import fits
from kvtier_kernels.lists import CellKV, ListKernels, ListTables
from kvtier_kernels.reference_backend.lists import ReferenceListPlan, ReferenceLists
from kvtier_kernels.states import AttentionState


@dataclass(eq=False)
class FlashInferListPlan:
    """The lists of a batch, as the host found them.

    otherwise: makes the Triton kernels' plan, for what FlashInfer does not serve
    layers:    the lists of a layer as a slot table of cells, once it was asked for
    """

    lists: ReferenceListPlan
    otherwise: Callable[[], Any]
    layers: dict[int, Any] = field(default_factory=dict)


class FlashInferLists(ListKernels):
    """plan_table, attend: `plan` and `over_entries` of the backend's kernels, over tables of cells.
    otherwise: serves what FlashInfer does not."""

    def __init__(
        self,
        plan_table: Callable[[torch.Tensor, Sequence[int]], Any],
        attend: Callable[..., AttentionState],
        otherwise: ListKernels,
    ) -> None:
        self._plan_table, self._attend, self._otherwise = plan_table, attend, otherwise
        self._reader = ReferenceLists()

    def plan(
        self,
        tables: ListTables,
        rows: torch.Tensor,
        dense: torch.Tensor,
        layers: int,
        heads: int,
        into: FlashInferListPlan | None = None,
    ) -> FlashInferListPlan:
        before = None if into is None else into.lists
        lists = self._reader.plan(tables, rows, dense, layers, heads, before)
        made: list[Any] = []

        def otherwise() -> Any:
            if not made:
                made.append(self._otherwise.plan(tables, rows, dense, layers, heads))
            return made[0]

        return FlashInferListPlan(lists, otherwise)

    def decode(
        self, q: torch.Tensor, kv: CellKV, plan: FlashInferListPlan, layer: int, scale: float
    ) -> AttentionState:
        if not _serves(q, kv):
            return self._otherwise.decode(q, kv, plan.otherwise(), layer, scale)
        rows = q.flatten(0, 1).unsqueeze(1)
        state = self._over_lists(rows, tuple(range(len(rows) + 1)), kv, plan, layer, scale)
        return AttentionState(state.o.view(q.shape), state.lse.view(q.shape[:-1]))

    def extend(
        self,
        q: torch.Tensor,
        q_indptr: Sequence[int],
        kv: CellKV,
        plan: FlashInferListPlan,
        layer: int,
        scale: float,
    ) -> AttentionState:
        if not _serves(q, kv):
            return self._otherwise.extend(q, q_indptr, kv, plan.otherwise(), layer, scale)
        heads, news = q.shape[1], [end - begin for begin, end in pairwise(q_indptr)]
        parts = [part.transpose(0, 1).flatten(0, 1) for part in torch.split(q, news)]
        indptr = (0, *accumulate(new for new in news for _ in range(heads)))
        rows = torch.cat(parts).unsqueeze(1)
        state = self._over_lists(rows, indptr, kv, plan, layer, scale)

        def by_token(x: torch.Tensor) -> torch.Tensor:
            """[rows, 1, ...] list by list as [tokens, heads, ...]."""
            lists = torch.split(x[:, 0], [heads * new for new in news])
            shapes = [(heads, new, *x.shape[2:]) for new in news]
            each = zip(lists, shapes, strict=True)
            return torch.cat([rows.view(shape).transpose(0, 1) for rows, shape in each])

        return AttentionState(by_token(state.o), by_token(state.lse))

    def _over_lists(
        self,
        rows: torch.Tensor,
        indptr: tuple[int, ...],
        kv: CellKV,
        plan: FlashInferListPlan,
        layer: int,
        scale: float,
    ) -> AttentionState:
        """rows [all lists' rows, 1, group, dim] of a layer; list i owns indptr[i]:indptr[i + 1]."""
        table = self._table(kv, plan, layer)
        return self._attend(rows, indptr, _flat(kv), table, scale, kv.log_votes)

    def _table(self, kv: CellKV, plan: FlashInferListPlan, layer: int) -> Any:
        """A layer's lists, request by request and head by head."""
        if layer not in plan.layers:
            cells, heads = [], plan.lists.heads
            for request in plan.lists.requests:
                for column in range(layer * heads, (layer + 1) * heads):
                    dense = request.slots.long() + column * kv.column_cells
                    cells.append(torch.cat((request.cells(column), dense)))
            indptr = (0, *accumulate(len(each) for each in cells))
            plan.layers[layer] = self._plan_table(torch.cat(cells), indptr)
        return plan.layers[layer]


def _flat(kv: CellKV) -> RaggedKV:
    """Cells as the slots of a layer with one head."""
    return RaggedKV(kv.k.unsqueeze(1), kv.v.unsqueeze(1))


def _serves(q: torch.Tensor, kv: CellKV) -> bool:
    """Return whether FlashInfer takes these queries over cells. Where drafts are decoded as one
    group, its rows have no votes of their own."""
    votes = kv.log_votes
    return fits(q[:, :1], _flat(kv)) and (
        votes is None or votes.ndim == 1 or votes.shape[-1] == q.shape[2]
    )

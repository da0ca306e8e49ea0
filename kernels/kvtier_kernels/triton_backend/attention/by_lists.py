"""Decoding and extending over lists in pages: one kernel, whatever rows there are, and a merge.

Decoding has a block of rows for every request (its KV head's group), extending has the rows of a
request's new tokens in as many blocks as they fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import triton

from kvtier_kernels.base import AttentionState
from kvtier_kernels.codes import CODED_ENTRY_BITS, coded_shape, rotated
from kvtier_kernels.lists import CellKV, ListKernels, ListTables
from kvtier_kernels.triton_backend.attention.codes import attend_codes
from kvtier_kernels.triton_backend.attention.lists import attend_stretch, merge_lists
from kvtier_kernels.triton_backend.attention.tiles import code_tile, list_tile, merge_tile
from kvtier_kernels.triton_backend.launching import (
    Launch,
    dim_contiguous,
    is_ieee,
    launch,
    multiprocessors,
    state_buffers,
    to_device,
)
from kvtier_kernels.triton_backend.planning.lists import Deal, ListPlan, fill_deal, new_deal

# Lists among which a program looks for its own at a time.
LOOKUP_LISTS = 512


class TritonLists(ListKernels):
    """See the module docstring. A plan is made when a layer first uses it, and again by `into`."""

    def __init__(self, launch: Launch = launch) -> None:
        self._launch = launch

    def plan(
        self,
        tables: ListTables,
        rows: torch.Tensor,
        dense: torch.Tensor,
        layers: int,
        heads: int,
        into: ListPlan | None = None,
    ) -> ListPlan:
        if into is None:
            return ListPlan(tables, rows, dense, layers, heads)
        plan = replace(into, tables=tables, rows=rows, dense=dense)
        for deal in plan.deals.values():
            fill_deal(self._launch, deal, plan)
        return plan

    def decode(
        self, q: torch.Tensor, kv: CellKV, plan: ListPlan, layer: int, scale: float
    ) -> AttentionState:
        return self._attend(q, None, kv, plan, layer, scale)

    def extend(
        self,
        q: torch.Tensor,
        q_indptr: Sequence[int],
        kv: CellKV,
        plan: ListPlan,
        layer: int,
        scale: float,
    ) -> AttentionState:
        return self._attend(q, tuple(q_indptr), kv, plan, layer, scale)

    def _attend(
        self,
        q: torch.Tensor,
        q_indptr: tuple[int, ...] | None,
        kv: CellKV,
        plan: ListPlan,
        layer: int,
        scale: float,
    ) -> AttentionState:
        q = dim_contiguous(q if kv.bits is None else rotated(q))
        tokens, heads, group, dim = q.shape
        o, lse = state_buffers((tokens, heads, group, dim), q.device, q.dtype)
        if tokens == 0:
            return AttentionState(o, lse)
        most = group if q_indptr is None else max(e - b for b, e in pairwise(q_indptr)) * group
        ieee = is_ieee(q)
        mode = 0 if kv.log_votes is None else kv.log_votes.ndim
        if kv.bits is None:
            tile = list_tile(dim, ieee, most, laden=mode == 2 or kv.k.itemsize == 1)
        else:
            tile = code_tile(dim, ieee, most)
        deal = self._deal(plan, q_indptr, group, tile.rows, tile.programs)
        lanes = min(tile.rows, most)
        merged = merge_tile(lanes)
        part_o, part_lse = state_buffers((deal.programs + deal.lists, lanes, dim), q.device)
        votes = kv.log_votes
        _, first, end = deal.blocks
        block_d = max(16, triton.next_power_of_2(dim))
        of_lists: tuple[Any, ...] = (
            *deal.blocks, deal.bounds, deal.stretch, part_o, part_lse, scale, layer, deal.lists,
            heads, lanes, plan.tables.pages.shape[1],
        )  # fmt: skip
        options = {
            "GROUP": group,
            "DIM": dim,
            "BLOCK_M": tile.rows,
            "BLOCK_D": block_d,
            "BLOCK_N": tile.entries,
            "BLOCK_L": LOOKUP_LISTS,
            "IEEE": ieee,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
            "maxnreg": tile.registers,
        }
        if kv.bits is None:
            self._launch(
                attend_stretch,
                (deal.programs,),
                q,
                kv.k,
                kv.v,
                kv.k if votes is None else votes,
                plan.tables.words,
                plan.tables.pages,
                plan.tables.slots,
                plan.rows,
                plan.dense,
                *of_lists,
                kv.column_cells,
                plan.tables.slots.stride(0),
                votes.shape[1] if votes is not None and votes.ndim == 2 else 1,
                *q.stride()[:3],
                VOTES=mode,
                **options,
            )
        else:
            k, v = kv.pages
            shape = coded_shape(kv.bits, dim)
            self._launch(
                attend_codes,
                (deal.programs,),
                q,
                k,
                v,
                plan.tables.words,
                plan.tables.pages,
                plan.rows,
                *of_lists,
                k.shape[1],
                *q.stride()[:3],
                BITS=shape.bits,
                ENTRIES=shape.entries,
                ENTRY_BITS=CODED_ENTRY_BITS,
                GROUPS=shape.groups,
                **options,
            )
        self._launch(
            merge_lists,
            (deal.lists, triton.cdiv(lanes, merged.rows)),
            part_o,
            part_lse,
            first,
            end,
            deal.bounds,
            deal.stretch,
            o,
            lse,
            layer,
            deal.lists,
            heads,
            lanes,
            GROUP=group,
            DIM=dim,
            BLOCK_D=block_d,
            BLOCK_P=merged.parts,
            BLOCK_R=merged.rows,
        )
        return AttentionState(o if kv.bits is None else rotated(o), lse)

    def _deal(
        self,
        plan: ListPlan,
        q_indptr: tuple[int, ...] | None,
        group: int,
        block_rows: int,
        per_multiprocessor: int,
    ) -> Deal:
        """Return the deal of such rows; the first layer that asks makes it for all of them."""
        key = (group, block_rows, per_multiprocessor, *(q_indptr or ()))
        if key not in plan.deals:
            device = plan.rows.device
            if q_indptr is None:
                blocks = _equal_blocks(plan.requests, group, block_rows, device)
            else:
                blocks = _blocks(q_indptr, group, block_rows, device)
            programs = per_multiprocessor * multiprocessors(device)
            plan.deals[key] = new_deal(self._launch, plan, blocks, programs)
        return plan.deals[key]


def _equal_blocks(requests: int, group: int, block_rows: int, device: torch.device) -> torch.Tensor:
    """`Deal.blocks` of one token a request, made on the device: a graph can record it."""
    each = triton.cdiv(group, block_rows)
    block = torch.arange(requests * each, dtype=torch.int32, device=device)
    request = block // each
    first = request * group + block % each * block_rows
    end = torch.minimum(first + block_rows, (request + 1) * group)
    return torch.stack([request, first, end])


def _blocks(
    q_indptr: Sequence[int], group: int, block_rows: int, device: torch.device
) -> torch.Tensor:
    """`Deal.blocks` of all tokens between q_indptr."""
    blocks = []
    for request, (begin, end) in enumerate(pairwise(q_indptr)):
        for first in range(begin * group, end * group, block_rows):
            blocks.append((request, first, min(first + block_rows, end * group)))
    return to_device(list(zip(*blocks, strict=True)), device)

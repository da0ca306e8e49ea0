"""The deal of attention over lists: equal stretches of pages, of whichever list.

    lists of a layer  |-- 0 --|- 1 -|| 3 |------------ 4 ------------|     2 has nothing
    programs          |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ---|

No list has programs of its own, so none waits for the longest one. Rows of queries come in blocks,
and a *list* here is one of a (block, KV head): what a request has is read once for every block of
its rows. Sixteen dense tokens count as a page.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvtier_kernels.lists import ListTables
from kvtier_kernels.triton_backend.launching import Launch
from kvtier_kernels.triton_backend.planning.deal import deal_pages

# A program has at least so many pages: fewer cost more in merging than they gain in balance.
LEAST_PAGES = 4
PLAN_BLOCK = 512


@dataclass(frozen=True)
class Deal:
    """The lists of some blocks of rows, dealt to programs, for every layer.

    blocks:   [3, blocks] int32, each block's request, its first row and the row after its last.
    bounds:   [layers, lists + 1] int32, where each list's pages begin.
    stretch:  [layers] int32, pages of a program.
    programs: how many share a layer.
    """

    blocks: torch.Tensor
    bounds: torch.Tensor
    stretch: torch.Tensor
    programs: int

    @property
    def lists(self) -> int:
        return self.bounds.shape[1] - 1


@dataclass(frozen=True)
class ListPlan:
    """The lists of a batch; `deals` are what layers made of them, keyed by how rows are cut in
    blocks."""

    tables: ListTables
    rows: torch.Tensor
    dense: torch.Tensor
    layers: int
    heads: int
    deals: dict[tuple[int, ...], Deal] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return self.rows.numel()


def new_deal(launch: Launch, plan: ListPlan, blocks: torch.Tensor, programs: int) -> Deal:
    lists, device = blocks.shape[1] * plan.heads, blocks.device
    bounds = torch.empty(plan.layers, lists + 1, dtype=torch.int32, device=device)
    stretch = torch.empty(plan.layers, dtype=torch.int32, device=device)
    deal = Deal(blocks, bounds, stretch, programs)
    fill_deal(launch, deal, plan)
    return deal


def fill_deal(launch: Launch, deal: Deal, plan: ListPlan) -> None:
    launch(
        deal_pages,
        (plan.layers,),
        plan.tables.pages,
        plan.rows,
        plan.dense,
        deal.blocks,
        deal.bounds,
        deal.stretch,
        plan.tables.pages.shape[1],
        plan.heads,
        deal.lists,
        deal.programs,
        LEAST=LEAST_PAGES,
        BLOCK=PLAN_BLOCK,
        num_warps=4,
    )

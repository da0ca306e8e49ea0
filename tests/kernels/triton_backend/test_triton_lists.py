"""The deal of lists to programs by the Triton backend."""

import pytest
import torch

from kvtier_kernels import ListTables, get_kernels
from kvtier_kernels.triton_backend import launching
from kvtier_kernels.triton_backend.planning import lists

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def device():
    with torch.device(DEVICE):
        yield


def test_programs_have_equal_stretches_of_all_pages():
    torch.manual_seed(0)
    layers, heads, requests, blocks, programs = 3, 4, 150, 200, 24
    pages = torch.randint(0, 90, (requests + 5, layers * heads), dtype=torch.int32)
    pages[torch.rand(pages.shape) < 0.3] = 0
    pages[:, heads : 2 * heads] = 0
    tables = ListTables(pages.long(), pages, pages)
    rows = torch.randperm(requests + 5)[:requests]
    dense = torch.randint(0, 200, (requests,))
    dense[:50] = 0
    owner = torch.randint(0, requests, (blocks,), dtype=torch.int32)
    plan = get_kernels("triton").lists.plan(tables, rows, dense, layers, heads)
    deal = lists.new_deal(launching.launch, plan, owner.expand(3, -1), programs)
    of_request = pages[rows].view(requests, layers, heads) + (dense[:, None, None] + 15) // 16
    for layer in range(layers):
        each = of_request[owner.long(), layer].flatten()
        bounds = deal.bounds[layer]
        assert bounds[0] == 0
        assert torch.equal(bounds.diff(), each.int())
        least = max(lists.LEAST_PAGES, -(-int(each.sum()) // programs))
        assert int(deal.stretch[layer]) == least


def test_a_plan_that_is_filled_again_stays_where_it_is():
    kernels, tables = get_kernels("triton").lists, ListTables(*torch.zeros(3, 2, 4).long())
    rows, dense = torch.arange(2), torch.tensor([40, 0])
    plan = kernels.plan(tables, rows, dense, 2, 2)
    deal = lists.new_deal(launching.launch, plan, rows.int().expand(3, -1), 8)
    plan.deals[4, 16] = deal
    assert kernels.plan(tables, rows, dense + 1000, 2, 2, into=plan).deals[4, 16] is deal
    assert deal.bounds[1].tolist() == [0, 65, 130, 193, 256]
    with pytest.raises(ValueError, match="into: expected a plan of 1 requests"):
        kernels.plan(tables, rows[:1], dense[:1], 2, 2, into=plan)

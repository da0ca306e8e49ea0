"""What the Triton backend plans on the device: slot tables, and how decoding is cut in units."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_kernels import RaggedKV, get_kernels
from kvtier_kernels.triton_backend import launching
from kvtier_kernels.triton_backend.planning import plans

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def device():
    with torch.device(DEVICE):
        yield


def tables(lengths, width, seed, *, holes, with_image):
    """table, rows, lengths, image, and what a plan of them has to hold."""
    generator = torch.Generator("cpu").manual_seed(seed)
    requests = len(lengths)
    table = torch.randint(1, 5000, (requests + 3, width), generator=generator, dtype=torch.int32)
    table[torch.rand(table.shape, generator=generator, device="cpu") < holes] = 0
    image = None
    if with_image:
        image = torch.randint(0, 3000, (5000,), generator=generator, dtype=torch.int64)
        image[::3] = 0
        image[0] = 0
    rows = torch.randperm(requests + 3, generator=generator)[:requests]
    expected = []
    for row, length in zip(rows.tolist(), lengths, strict=True):
        slots = table[row, :length].long()
        slots = slots if image is None else image[slots]
        expected.append(slots[slots > 0])
    on_device = [x if x is None else x.to(DEVICE) for x in (table, rows, image)]
    return on_device[0], on_device[1], torch.tensor(lengths), on_device[2], expected


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 2500), min_size=1, max_size=5),
    holes=st.sampled_from([0.0, 0.3, 1.0]),
    with_image=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_plan_made_on_the_device_holds_what_is_not_zero_in_order(
    lengths, holes, with_image, seed
):
    kernels = get_kernels("triton")
    with torch.device("cpu"):
        made = tables(lengths, 2500, seed, holes=holes, with_image=with_image)
    table, rows, on_device, image, expected = made
    plan = kernels.plan_on_device(table, rows, on_device.to(DEVICE), max(lengths) + 1, image)
    bounds = [0, *itertools.accumulate(len(one) for one in expected)]
    assert plan.indptr.tolist() == bounds
    assert plan.slots[: bounds[-1]].tolist() == torch.cat(expected).tolist()


def test_a_plan_that_is_filled_again_serves_other_lengths_at_the_same_addresses():
    """As a CUDA graph does it: nothing may depend on what the tensors held before."""
    kernels = get_kernels("triton")
    torch.manual_seed(1)
    k, v = torch.randn(2, 5000, 2, 32)
    q = torch.randn(3, 2, 4, 32)
    plan = kernels.empty_plan(torch.empty(3 * 4000, dtype=torch.int32), 3, voted=False)
    for seed, lengths in enumerate([[5, 4000, 1], [900, 0, 2048], [1, 1, 1]]):
        with torch.device("cpu"):
            made = tables(lengths, 4000, seed, holes=0.2, with_image=False)
        table, rows, on_device, _, expected = made
        kernels.plan_on_device(table, rows, on_device.to(DEVICE), 4000, into=plan)
        state = kernels.decode(q, RaggedKV(k, v), plan, 0.2)
        bounds = [0, *itertools.accumulate(len(one) for one in expected)]
        fresh = kernels.plan(torch.cat(expected).to(DEVICE), bounds)
        known = kernels.decode(q, RaggedKV(k, v), fresh, 0.2)
        torch.testing.assert_close(state.o, known.o)
        torch.testing.assert_close(state.lse, known.lse)
    assert len(plan.schedules) == 1


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 40_000), min_size=1, max_size=40),
    heads=st.integers(1, 8),
)
def test_units_cover_every_entry_once_in_stretches_of_one_size(lengths, heads):
    kernels = get_kernels("triton")
    bounds = [0, *itertools.accumulate(lengths)]
    plan = kernels.plan(torch.empty(0, dtype=torch.int64), bounds)
    schedule = plans.schedule_for(launching.launch, plan, heads)
    size = int(schedule.stretch)
    units = [-(-length // size) for length in lengths]
    assert schedule.units_indptr.tolist() == [0, *itertools.accumulate(units)]
    owners = [request for request, count in enumerate(units) for _ in range(count)]
    idle = schedule.max_units - len(owners)
    assert idle >= 0
    assert schedule.unit_request.tolist() == owners + [len(lengths)] * idle
    # Balanced: no unit has more than its share, but for the smallest stretch.
    least = plans.LEAST_STRETCH
    assert size % least == 0
    assert size - least < max(sum(lengths) / schedule.target_units, 1)

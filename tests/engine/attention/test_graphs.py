"""The recording of decoding in CUDA graphs: run again over changed tables a graph gives what the
reference kernels plan afresh, at the same addresses, and asks the host nothing. Without a GPU
nothing is captured; the part that would be is called again.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvtier.config import load_settings
from kvtier.heads.profile import ModelShape
from kvtier_kernels.triton_backend.kernels import TritonKernels
from kvtier_sglang.attention.backend import KvtierAttnBackend
from kvtier_sglang.attention.plans import Planner
from kvtier_sglang.pool.allocator import BundleAllocator
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, KV_HEADS, GROUP, DIM = 2, 2, 2, 32
SLOTS, CONTEXT, REQUESTS = 600, 200, 4


def make_pool(**options: Any) -> HeadPagedKVPool:
    shape = ModelShape(
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        num_attention_heads=KV_HEADS * GROUP,
        head_dim=DIM,
    )
    return HeadPagedKVPool(SLOTS, shape=shape, dtype=torch.float32, device=DEVICE, **options)


def static_batch() -> SimpleNamespace:
    """The tensors that a graph of REQUESTS requests reads."""
    return SimpleNamespace(
        batch_size=REQUESTS,
        req_pool_indices=torch.zeros(REQUESTS, dtype=torch.int64, device=DEVICE),
        seq_lens=torch.zeros(REQUESTS, dtype=torch.int64, device=DEVICE),
        out_cache_loc=torch.zeros(REQUESTS, dtype=torch.int64, device=DEVICE),
    )


def eager(batch: SimpleNamespace) -> SimpleNamespace:
    mode = ForwardMode.DECODE
    return SimpleNamespace(**vars(batch), seq_lens_cpu=batch.seq_lens.cpu(), forward_mode=mode)


def a_layer(index: int) -> SimpleNamespace:
    """An attention layer, as SGLang hands it over."""
    return SimpleNamespace(
        layer_id=index,
        tp_k_head_num=KV_HEADS,
        tp_q_head_num=KV_HEADS * GROUP,
        qk_head_dim=DIM,
        scaling=DIM**-0.5,
    )


def layers(backend: KvtierAttnBackend, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what each layer gives of its q, k, v."""
    found = []
    for index, qkv in enumerate(inputs):
        q, k, v = qkv.split([GROUP * KV_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
        found.append(backend.forward_decode(q.contiguous(), k, v, a_layer(index), None))
    return found


def some_inputs(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = (GROUP + 2) * KV_HEADS * DIM
    made = [torch.randn(REQUESTS, width, generator=generator) for _ in range(LAYERS)]
    return [one.to(DEVICE) for one in made]


def recorded_once(step: Callable[[], None]) -> Callable[[], None]:
    """Record a step and return a function that runs its work again."""
    if DEVICE == "cpu":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@pytest.fixture(params=[None, 4], ids=["entries", "codes"])
def packing(request):
    """A runner whose heads may keep different numbers of entries: three spans, of four bundles
    each, which four requests have none, one or two of. All but the first are coded, where any
    is."""
    torch.manual_seed(3)
    pool = make_pool(state_width=0, packs=True, bits=request.param)
    for layer in pool.kv:
        layer.k.normal_()
        layer.v.normal_()
    spans = []
    for first in (64, 128, 192):
        counts = torch.randint(0, 80, (LAYERS * KV_HEADS,))
        slots = torch.arange(first, first + 64, device=DEVICE)
        coded = pool.packed.coded if spans else None
        spans.append(pool.packed.span(slots, counts.tolist(), coded=coded))
        pool.packed.add(spans[-1])
        if coded is not None:
            pool.packed.code(spans[-1], lambda numbers: torch.randn(2, len(numbers), DIM))
    table = torch.zeros(REQUESTS + 1, CONTEXT, dtype=torch.int32, device=DEVICE)
    runner = SimpleNamespace(
        token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=table), device=DEVICE
    )
    return runner, spans


def begin(backend: KvtierAttnBackend, runner, spans, seed: int) -> list[int]:
    """New requests in all rows. Returns how many tokens each has."""
    generator = torch.Generator().manual_seed(seed)
    free = torch.arange(300, SLOTS)[torch.randperm(SLOTS - 300, generator=generator)]
    lengths = []
    for row, held in enumerate(([], spans[:1], spans[1:], []), start=1):
        own = free[20 * row : 20 * row + 3 * row].to(DEVICE)
        dropped = torch.zeros(5, dtype=torch.int64, device=DEVICE)
        slots = torch.cat([own[:2], *(x for span in held for x in (span.slots, dropped)), own[2:]])
        new = free[100 + row : 101 + row].to(DEVICE)
        backend.planner.lists.begin(row, slots, new)
        lengths.append(len(slots) + 1)
    return lengths


def grow(batch: SimpleNamespace, lengths: list[int], step: int) -> None:
    """The next decoding step of requests, in the order of their rows turned round; a length of 0
    is that of one that has ended."""
    for static in (batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc):
        static.zero_()
    live = [row for row in range(REQUESTS, 0, -1) if lengths[row - 1]]
    for place, row in enumerate(live):
        lengths[row - 1] += 1
        batch.req_pool_indices[place] = row
        batch.seq_lens[place] = lengths[row - 1]
        batch.out_cache_loc[place] = 500 + 10 * step + place


def test_what_was_recorded_serves_other_requests_as_they_grow(packing):
    runner, spans = packing
    reference, recorded = (
        KvtierAttnBackend(runner, load_settings(kernels=name)) for name in ("reference", "triton")
    )
    recorded.init_cuda_graph_state(REQUESTS, REQUESTS)
    batch, inputs, got = static_batch(), some_inputs(0), []
    recorded.init_forward_metadata_out_graph(batch, in_capture=True)

    def step() -> None:
        recorded.init_forward_metadata_in_graph(batch)
        got[:] = layers(recorded, inputs)

    replay = recorded_once(step)
    addresses = set()
    for seed in range(2):
        lengths = begin(recorded, runner, spans, seed)
        assert begin(reference, runner, spans, seed) == lengths
        for number in range(2):
            if number == 1:
                lengths[1] = 0
            grow(batch, lengths, 2 * seed + number)
            for static, new in zip(inputs, some_inputs(number), strict=True):
                static.copy_(new)
            replay()
            plans = recorded.forward_metadata.lists
            assert (plans.codes is None) == (runner.token_to_kv_pool.packed.coded is None)
            (deal,) = plans.entries.deals.values()
            addresses.add((deal.bounds.data_ptr(), deal.stretch.data_ptr()))
            reference.init_forward_metadata(eager(batch))
            expected = layers(reference, inputs)
            real = sum(length > 0 for length in lengths)
            for ours, theirs in zip(got, expected, strict=True):
                torch.testing.assert_close(ours[:real], theirs[:real], rtol=2e-5, atol=2e-5)
                assert torch.isfinite(ours).all(), "a padded row spoils nothing"
    assert len(addresses) == 1


def test_a_row_that_got_other_slots_is_written_again_before_a_replay(packing):
    """This happens where another request published the same tokens, and this one's own are free."""
    runner, spans = packing
    backend = KvtierAttnBackend(runner, load_settings(kernels="reference"))
    backend.init_cuda_graph_state(REQUESTS, REQUESTS)
    batch = static_batch()
    lengths = begin(backend, runner, spans, 0)
    grow(batch, lengths, 0)
    held = lengths[0] - 1
    other = torch.arange(400, 400 + held, dtype=torch.int32, device=DEVICE)
    runner.req_to_token_pool.req_to_token[1, :held] = other
    before = backend.planner.lists.tables.slots.clone()
    runner.token_to_kv_pool.moved |= {1}
    backend.init_forward_metadata_out_graph(batch)
    after = backend.planner.lists.tables.slots
    assert torch.equal(after[1, :held], other)
    assert torch.equal(after[2:], before[2:])
    assert not runner.token_to_kv_pool.moved


def test_what_is_recorded_asks_the_host_nothing(packing):
    runner, spans = packing
    backend = KvtierAttnBackend(runner, load_settings(kernels="triton"))
    backend.kernels = TritonKernels(launch_nothing)
    backend.planner = Planner(backend.kernels, backend.pool, backend.req_to_token)
    backend.init_cuda_graph_state(REQUESTS, REQUESTS)
    batch, inputs = static_batch(), some_inputs(0)
    grow(batch, begin(backend, runner, spans, 0), 0)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    layers(backend, inputs)
    with OnTheDeviceOnly():
        backend.init_forward_metadata_in_graph(batch)
        layers(backend, inputs)


class AsksTheHostError(Exception):
    """An operation that a CUDA graph cannot record."""


class OnTheDeviceOnly(TorchDispatchMode):
    """Refuses what waits for the device, copies from the host, or has a size that data decides."""

    REFUSED = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.lift_fresh.default,
        torch.ops.aten.unique_consecutive.default,
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.REFUSED:
            raise AsksTheHostError(func)
        if func is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        ):
            raise AsksTheHostError(func)
        return func(*args, **(kwargs or {}))


def launch_nothing(*args, **options):
    """Kernels themselves wait for nothing; the interpreter would."""


@pytest.mark.parametrize("packs", [False, True])
def test_handing_out_slots_asks_the_host_nothing(packs):
    allocator = BundleAllocator(make_pool(state_width=1, packs=packs))
    with OnTheDeviceOnly():
        assert allocator.alloc(1).numel() == 1
        assert allocator.alloc(4).numel() == 4
    assert allocator.check_integrity() == []


def test_the_checks_above_can_fail():
    x = torch.randn(3, 4)
    for asks in (
        lambda: x[0, 0].item(),
        lambda: x[:, [0, 2]],
        lambda: x[x > 0],
        lambda: torch.tensor([1, 2]),
        lambda: x.__setitem__(torch.zeros(1, dtype=torch.long), 0.0),
    ):
        with pytest.raises(AsksTheHostError), OnTheDeviceOnly():
            asks()

"""The calls before there are requests: every variant that they would have to wait for."""

import torch
from test_graphs import make_pool

from kvtier_kernels.triton_backend.attention.dense import DensePrefixes
from kvtier_kernels.triton_backend.kernels import TritonKernels
from kvtier_kernels.triton_backend.launching import launch
from kvtier_sglang.attention.plans import warm_up


def test_every_variant_of_extending_is_called_and_nothing_is_written():
    pool = make_pool(packs=True, votes=1)
    for layer in pool.kv:
        layer.k.normal_()
    before = [layer.k.clone() for layer in pool.kv]
    kernels, shapes = set(), set()

    def recording(kernel, grid, *arguments, **options):
        kernels.add(kernel.__name__)
        launch(kernel, grid, *arguments, **options)

    def attend(q, k, v, scale, *, causal):
        shapes.add((len(q), 0 if causal else len(k)))
        return torch.zeros_like(q), torch.zeros(q.shape[:2], device=q.device)

    dense = DensePrefixes(attend, blocks=(64, 32), rows=8)
    warm_up(TritonKernels(recording, dense), pool, dtype=torch.float32, chunk=20, context=40)
    assert {"extend_blocks", "attend_stretch", "merge_two"} <= kernels
    assert shapes == {(8, 0), (16, 0), (8, 32), (16, 32)}
    after = [layer.k for layer in pool.kv]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))

"""What is called before there are requests: every variant that they would have to wait for."""

import pytest
import torch
from test_graphs import make_pool

from kvtier_kernels.triton_backend.attention.dense import DensePrefixes
from kvtier_kernels.triton_backend.kernels import TritonKernels
from kvtier_kernels.triton_backend.launching import launch
from kvtier_sglang.attention.warm_up import warm_up

NONE, PER_ENTRY, PER_QUERY_HEAD = 0, 1, 2


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("window", [None, (4, 16)])
def test_every_variant_of_extending_is_called_and_nothing_is_written(merges, window):
    pool = make_pool(merges=merges)
    for buffers in (*pool.ca, *pool.locality):
        buffers.k.normal_()
    before = [buffers.k.clone() for buffers in (*pool.ca, *pool.locality)]
    variants, shapes = set(), set()

    def recording(kernel, grid, *arguments, **options):
        if "WINDOW" in options:
            variants.add((options["VOTES"], options["WINDOW"]))
        launch(kernel, grid, *arguments, **options)

    def attend(q, k, v, scale, *, causal):
        shapes.add((len(q), 0 if causal else len(k)))
        return torch.zeros_like(q), torch.zeros(q.shape[:2], device=q.device)

    dense = DensePrefixes(attend, blocks=(64, 32), rows=8)
    warm_up(
        TritonKernels(recording, dense),
        pool,
        dtype=torch.float32,
        chunk=20,
        context=40,
        window=window,
    )
    streams = window is not None
    expected = {(NONE, False), (NONE, streams), (PER_ENTRY, streams)}
    assert variants == expected | ({(PER_QUERY_HEAD, False)} if merges else set())
    assert shapes == {(8, 0), (16, 0), (8, 32), (16, 32)}
    after = [buffers.k for buffers in (*pool.ca, *pool.locality)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))

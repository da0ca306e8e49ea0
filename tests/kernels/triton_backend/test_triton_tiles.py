"""The interpreter takes one tile for speed; a GPU takes smaller ones, and they give the same."""

import pytest
import torch

from kvtier_kernels import RaggedKV, get_kernels
from kvtier_kernels.triton_backend.attention import tiles
from kvtier_kernels.triton_backend.launching import is_interpreted

SCALE = 0.2


@pytest.mark.skipif(not is_interpreted(), reason="a GPU takes its own tiles")
def test_the_tiles_of_a_gpu_give_what_the_reference_gives(monkeypatch):
    monkeypatch.setattr(tiles, "INTERPRETED_TILE", 16)
    torch.manual_seed(16)
    indptr, q_indptr = [0, 0, 40, 57], [0, 3, 22, 27]
    k, v = torch.randn(2, 200, 2, 32)
    kv = RaggedKV(k, v)
    slots = torch.randperm(200)[: indptr[-1]]
    q = torch.randn(q_indptr[-1], 2, 4, 32)
    k_new, v_new = torch.randn(2, q_indptr[-1], 2, 32)
    ours, theirs = (
        kernels.extend(q, k_new, v_new, q_indptr, kv, kernels.plan(slots, indptr), SCALE)
        for kernels in (get_kernels("triton"), get_kernels("reference"))
    )
    torch.testing.assert_close(ours.o, theirs.o, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(ours.lse, theirs.lse, rtol=2e-5, atol=2e-5)

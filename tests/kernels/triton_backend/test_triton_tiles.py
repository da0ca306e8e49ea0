"""The interpreter takes one tile for speed; a GPU takes smaller ones, and they give the same."""

import pytest
import torch

from kvtier_kernels import RaggedKV, get_kernels
from kvtier_kernels.triton_backend.attention import tiles
from kvtier_kernels.triton_backend.launching import is_interpreted

SCALE = 0.2


@pytest.mark.skipif(not is_interpreted(), reason="a GPU takes its own tiles")
@pytest.mark.parametrize("tile", [16, 32])
def test_the_tiles_of_a_gpu_give_what_the_reference_gives(tile, monkeypatch):
    monkeypatch.setattr(tiles, "INTERPRETED_TILE", tile)
    torch.manual_seed(tile)
    indptr, q_indptr = [0, 0, 75, 140], [0, 3, 22, 40]
    k, v = torch.randn(2, 200, 2, 32)
    kv = RaggedKV(k, v, torch.rand(200))
    slots = torch.randperm(200)[: indptr[-1]]
    q, new = torch.randn(3, 2, 4, 32), torch.randn(q_indptr[-1], 2, 4, 32)
    k_new, v_new = torch.randn(2, q_indptr[-1], 2, 32)
    found = {}
    for name in ("triton", "reference"):
        kernels = get_kernels(name)
        plan = kernels.plan(slots, indptr, kv.log_votes)
        found[name] = (
            kernels.decode(q, kv, plan, SCALE),
            kernels.extend(new, k_new, v_new, q_indptr, kv, plan, SCALE),
        )
    for ours, theirs in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(ours.o, theirs.o, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(ours.lse, theirs.lse, rtol=2e-5, atol=2e-5)

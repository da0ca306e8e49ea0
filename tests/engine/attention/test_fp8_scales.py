"""An fp8 cache with scales: the bytes are SGLang's, and attention is over what they stand for."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from test_graphs import DIM, GROUP, KV_HEADS, a_layer

from kvtier.config import load_settings
from kvtier.errors import StartupError
from kvtier.heads.profile import HeadProfile, ModelShape
from kvtier.retention.scorers.compactor import Compactor
from kvtier_kernels.fp8 import as_stored
from kvtier_sglang.attention.backend import KvtierAttnBackend
from kvtier_sglang.compression.selection import ProfileSelection
from kvtier_sglang.pool.allocator import BundleAllocator
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool
from kvtier_sglang.pool.scales import KvScales

SHAPE = ModelShape(
    num_layers=2, num_kv_heads=KV_HEADS, num_attention_heads=KV_HEADS * GROUP, head_dim=DIM
)
# A scale of the keys, of the values, and one that SGLang has as a number only.
SCALES = (
    SimpleNamespace(k_scale=torch.tensor(0.03), v_scale=torch.tensor(7.0), k_scale_float=0.03,
                    v_scale_float=7.0),
    SimpleNamespace(k_scale=0.5, v_scale=None),
)  # fmt: skip
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_that_is_no_positive_number_is_refused(bad, monkeypatch):
    layers = {0: SimpleNamespace(k_scale=1.0, v_scale=bad)}
    monkeypatch.setattr("kvtier_sglang.pool.scales.attention_layers", lambda model: layers)
    with pytest.raises(StartupError, match=r"^KV cache scales: expected positive numbers"):
        KvScales.of_model(None, range(1), FP8)
    # No other cache reads them.
    assert KvScales.of_model(None, range(1), torch.bfloat16).of(0) == (1.0, 1.0)


@pytest.fixture
def backend():
    pool = HeadPagedKVPool(
        100, shape=SHAPE, dtype=FP8, device="cpu", state_width=1, packs=True, votes=1
    )
    pool.scales = KvScales(SCALES)
    runner = SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(2, 64, dtype=torch.int32)),
        device="cpu",
    )
    return KvtierAttnBackend(runner, load_settings(kernels="reference"))


def run_pass(backend, inputs, slots, held):
    """One request's new tokens through both layers; a single one is decoded."""
    new = slots.numel()
    backend.req_to_token[1, held : held + new] = slots.to(torch.int32)
    mode = ForwardMode.EXTEND if new > 1 else ForwardMode.DECODE
    batch = SimpleNamespace(
        forward_mode=mode,
        req_pool_indices=torch.tensor([1]),
        seq_lens=torch.tensor([held + new]),
        seq_lens_cpu=torch.tensor([held + new]),
        extend_seq_lens_cpu=[new],
        extend_prefix_lens_cpu=[held],
        out_cache_loc=slots,
    )
    backend.init_forward_metadata(batch)
    forward = backend.forward_extend if new > 1 else backend.forward_decode
    return [
        forward(*(one.flatten(1) for one in qkv), a_layer(index), batch)
        for index, qkv in enumerate(inputs)
    ]


def test_passes_attend_over_what_sglang_would_have_stored(backend):
    """A chunk, a second one and a decoded token, against causal attention over all of them."""
    torch.manual_seed(0)
    pool, passes = backend.pool, (20, 11, 1)
    total = sum(passes)
    q = torch.randn(2, total, KV_HEADS, GROUP, DIM)
    # Most of them would not fit the cache, or would round to nothing, without their scale.
    k, v = (2e-3 * torch.randn(2, total, KV_HEADS, DIM) for _ in "kv")
    k[0] *= 1e3
    v[0] *= 1e6
    slots, held, found = BundleAllocator(pool).alloc(total), 0, []
    for new in passes:
        rows = slice(held, held + new)
        inputs = [(q[i, rows], k[i, rows], v[i, rows]) for i in range(2)]
        found.append(run_pass(backend, inputs, slots[rows], held))
        held += new
    for index, scales in enumerate(pool.scales.all()):
        keys = as_stored(k[index], FP8, scales.k) * scales.k
        values = as_stored(v[index], FP8, scales.v) * scales.v
        logits = torch.einsum("rhgd,ehd->rhge", q[index], keys) * DIM**-0.5
        later = torch.arange(total)[None, :] > torch.arange(total)[:, None]
        weights = logits.masked_fill(later[:, None, None, :], float("-inf")).softmax(-1)
        expected = torch.einsum("rhge,ehd->rhgd", weights, values).flatten(1)
        outputs = torch.cat([one[index] for one in found])
        size = float(values.abs().max())
        torch.testing.assert_close(outputs / size, expected / size, rtol=1e-5, atol=1e-6)
        # The bytes are those of SGLang's own pools.
        bits = (k[index] / scales.k).to(FP8).view(torch.uint8)
        assert torch.equal(pool.kv[index].sides[0][slots], bits)


class Seen(Compactor):
    """Remembers what it was asked."""

    def score(self, span):
        self.spans.append(span)
        return super().score(span)


def test_a_scorer_sees_the_models_numbers(backend):
    pool, scorer = backend.pool, Seen()
    object.__setattr__(scorer, "spans", [])
    # There is a whole bundle among them.
    slots = BundleAllocator(pool).alloc(40)
    q, k = torch.randn(40, KV_HEADS, GROUP, DIM), torch.randn(40, KV_HEADS, DIM)
    run_pass(backend, [(q, k, k)] * 2, slots, 0)
    profile = HeadProfile(model="test", shape=SHAPE, method="test", ca_heads=((0, 1), ()))
    selection = ProfileSelection(
        pool, scorer, [None, None], profile=profile, most_anchored=2, compensation=True
    )
    selection.compact(slots, 0, 10)
    (span,) = scorer.spans
    expected = as_stored(k, FP8, 0.03).transpose(0, 1) * 0.03
    torch.testing.assert_close(span.keys, expected)

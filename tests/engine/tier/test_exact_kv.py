"""Exact KV that came back is read where it landed: the heads and tokens that a refresh asks for."""

from __future__ import annotations

from unittest.mock import create_autospec

import numpy as np
import pytest
import torch

from kvtier.errors import UsageError
from kvtier.retention.refreshing import PrunedRange
from kvtier.tier.blobs.names import SpanName
from kvtier.tier.blobs.payload import DTYPE_BYTES, SpanLayout
from kvtier.tier.link.link import TierLink
from kvtier.tier.prefetch import HostSpans, Layouts
from kvtier_kernels.fp8 import raw, widened
from kvtier_sglang.refresh.exact_kv import ExactKv

LAYERS, HEADS, DIM, SPAN = 2, 3, 16, 32
ENDS = [(0, SPAN), (SPAN, 2 * SPAN), (2 * SPAN, 2 * SPAN + 7)]


def stored(dtype: str, ends: list[tuple[int, int]]) -> tuple[ExactKv, torch.Tensor]:
    """Exact KV as it landed, scores of 12 bytes per token behind it, and all of it: `[layers, 2,
    tokens, KV heads, dim]`."""
    layouts = Layouts(SpanLayout(dtype, LAYERS, SPAN, HEADS, DIM, score_bytes=12 * SPAN))
    generator = torch.Generator().manual_seed(0)
    spans = [SpanName(bytes(32), begin, stop) for begin, stop in ends]
    payloads, parts = [], []
    for span in spans:
        layout = layouts.of(span)
        kv = torch.randn(layout.shape, generator=generator).to(getattr(torch, dtype))
        scores = np.zeros(layout.score_bytes, np.uint8)
        payloads.append(np.concatenate((kv.view(-1).view(torch.uint8).numpy(), scores)))
        parts.append(raw(kv))
    host = HostSpans(spans, payloads, create_autospec(TierLink), 0)
    return ExactKv(host, layouts), torch.cat(parts, dim=2).view(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize(("begin", "end"), [(3, 30), (20, 70), (64, 71)])
def test_a_range_has_the_keys_and_values_of_its_heads_and_tokens(dtype, begin, end):
    exact, kv = stored(dtype, ENDS)
    for layer in range(LAYERS):
        found = exact.of_range(layer, (0, 2), PrunedRange(begin, end, 1))
        for side, own in zip(kv[layer], found, strict=True):
            expected = widened(raw(side)[begin:end, [0, 2]].view(side.dtype))
            assert torch.equal(own, expected.transpose(0, 1))


@pytest.mark.parametrize("ends", [ENDS[:2], ENDS[1:], [ENDS[0], ENDS[2]]])
def test_spans_with_a_gap_in_the_range_are_refused(ends):
    exact, _ = stored("float32", ends)
    with pytest.raises(UsageError, match="without a gap"):
        exact.of_range(0, (0,), PrunedRange(10, 70, 1))

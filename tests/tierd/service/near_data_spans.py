"""Spans of exact KV, queries and rules for the tests of refreshing near the data."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import torch
from waiting import SAFETY_S

from kvtier.retention.keepkv import KeepKV, QueryWindow
from kvtier.retention.refreshing import RefreshRule
from kvtier.tier.blobs.names import SpanName
from kvtier.tier.blobs.payload import SpanLayout
from kvtier.tier.client import Blob, TierClient
from kvtier.tier.near_data.exact_kv import ExactSpan
from kvtier.tier.near_data.messages import Context
from kvtier.tier.near_data.session import NearData
from kvtier.tier.transport.connection import Deadline

LAYERS, HEADS, GROUP, DIM, SPAN = 2, 3, 2, 16, 32
DTYPES = ["float32", "bfloat16", "float16"]
RULES = {
    "dropped": RefreshRule(KeepKV(pool_width=1), merges=False),
    "merged": RefreshRule(KeepKV(floor=0.0, pool_width=1), merges=True),
}
FLAGS = ("--memory", "16m", "--refresh-workers", "1")


def make_spans(count: int, dtype: str, seed: int = 0) -> list[ExactSpan]:
    """Spans that follow each other, scores of 12 bytes per token behind their KV."""
    layout = SpanLayout(dtype, LAYERS, SPAN, HEADS, DIM, score_bytes=12 * SPAN)
    generator = torch.Generator().manual_seed(seed)
    spans = []
    for number in range(count):
        kv = torch.randn(layout.shape, generator=generator).to(getattr(torch, dtype))
        flat = kv.reshape(-1).view(torch.uint8).numpy()
        payload = np.concatenate((flat, np.zeros(layout.score_bytes, np.uint8)))
        spans.append(ExactSpan(number * SPAN, (number + 1) * SPAN, payload, layout))
    return spans


def names_of(spans: list[ExactSpan], seed: int = 0) -> list[SpanName]:
    return [
        SpanName(sha256(f"{span} {seed}".encode()).digest(), span.begin, span.stop)
        for span in spans
    ]


def store(client: TierClient, spans: list[ExactSpan], names: list[SpanName]) -> None:
    for span, name in zip(spans, names, strict=True):
        client.put(Blob(name.key, span.layout.encode(), [span.payload.data]))


def make_window(seed: int, heads: int, dtype: str) -> QueryWindow:
    q = torch.randn(8, heads, GROUP, DIM, generator=torch.Generator().manual_seed(seed))
    return QueryWindow(q.to(getattr(torch, dtype)), DIM**-0.5)


def opened(client: TierClient, context: Context) -> NearData:
    session = NearData.open(client, context, Deadline(SAFETY_S))
    assert session is not None
    return session

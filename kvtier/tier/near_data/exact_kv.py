"""Exact KV in stored spans, read in place, and what a refresh keeps of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvtier.errors import UsageError
from kvtier.retention.keepkv import QueryWindow
from kvtier.retention.refreshing import Chosen, PrunedRange, RefreshRule
from kvtier.tier.blobs.payload import SpanLayout
from kvtier_kernels.fp8 import raw, widened


class ExactSpan(NamedTuple):
    """Exact KV of tokens [begin, stop): uint8 `[bytes]` as `layout` says."""

    begin: int
    stop: int
    payload: np.ndarray
    layout: SpanLayout


def exact_kv(
    spans: Sequence[ExactSpan], layer: int, heads: Sequence[int], pruned: PrunedRange
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a pruned range's tokens, of some heads of a layer: `[heads, tokens, dim]`,
    in the spans' dtype, or of fp8 in one that arithmetic works in.

    Raises UsageError where the spans have a gap in the pruned range.
    """
    parts, stop = [], pruned.begin
    for span in spans:
        first, last = max(span.begin, pruned.begin), min(span.stop, pruned.end)
        if first < last and first == stop:
            kv = span_layer(span.payload, span.layout, layer)
            part = raw(kv)[:, first - span.begin : last - span.begin, list(heads)].view(kv.dtype)
            parts.append(widened(part))
            stop = last
    if stop != pruned.end:
        raise UsageError("spans", f"tokens {pruned.begin} … {pruned.end} without a gap", stop)
    both = torch.cat(parts, dim=1).permute(0, 2, 1, 3)
    return both[0], both[1]


def choose_ranges(
    rule: RefreshRule,
    spans: Sequence[ExactSpan],
    layer: int,
    heads: Sequence[int],
    ranges: Sequence[PrunedRange],
    window: QueryWindow,
) -> list[Chosen]:
    """Choose what some heads of a layer keep of each pruned range, where the queries are.

    window: the heads' newest queries. Raises UsageError like `exact_kv` and the rule.
    """
    chosen = []
    for pruned in ranges:
        k, v = (side.to(window.q.device) for side in exact_kv(spans, layer, heads, pruned))
        chosen.append(rule.choose(k, v, pruned.kept, window))
    return chosen


def span_layer(payload: np.ndarray, layout: SpanLayout, layer: int) -> torch.Tensor:
    """One layer of a span: `[2 (k, v), tokens, KV heads, dim]`.

    payload: uint8 `[bytes]`; not copied where it may be written to.
    Raises UsageError for a layer that is not there.
    """
    if not 0 <= layer < layout.num_layers:
        raise UsageError("layer", f"0 … {layout.num_layers - 1}", layer)
    size = layout.kv_bytes // layout.num_layers
    part = payload[layer * size : (layer + 1) * size]
    if not part.flags.writeable:
        # Torch has no read-only tensors.
        part = part.copy()
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return torch.from_numpy(part).view(dtype).view(layout.shape[1:])

"""The exact KV of a context that came back from the tier, as a refresh reads it where it landed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtier.errors import UsageError
from kvtier.retention.refreshing import PrunedRange
from kvtier.tier.prefetch import HostSpans, Layouts
from kvtier_kernels.fp8 import raw, widened


@dataclass(frozen=True)
class ExactKv:
    """One context's exact KV in host memory. host: its spans, which this owns."""

    host: HostSpans
    layouts: Layouts

    def of_range(
        self, layer: int, heads: Sequence[int], pruned: PrunedRange
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a pruned range's tokens, of some heads of a layer: `[heads, tokens,
        dim]` on the host, in the spans' dtype, or of fp8 in one that arithmetic works in.

        Raises UsageError where the spans have a gap in the pruned range.
        """
        parts, stop = [], pruned.begin
        for position, span in enumerate(self.host.spans):
            first, last = max(span.begin, pruned.begin), min(span.stop, pruned.end)
            if first < last and first == stop:
                kv = self._layer(position, layer)
                rows = slice(first - span.begin, last - span.begin)
                parts.append(widened(raw(kv)[:, rows, list(heads)].view(kv.dtype)))
                stop = last
        if stop != pruned.end:
            raise UsageError("spans", f"tokens {pruned.begin} … {pruned.end} without a gap", stop)
        both = torch.cat(parts, dim=1).permute(0, 2, 1, 3)
        return both[0], both[1]

    def _layer(self, position: int, layer: int) -> torch.Tensor:
        """One layer of a span, not copied: `[2 (k, v), tokens, KV heads, dim]`."""
        layout = self.layouts.of(self.host.spans[position])
        kv = torch.from_numpy(self.host.payloads[position][: layout.kv_bytes])
        dtype: torch.dtype = getattr(torch, layout.dtype)
        return kv.view(dtype).view(layout.shape)[layer]

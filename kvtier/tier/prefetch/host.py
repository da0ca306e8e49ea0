"""Spans of exact KV in host memory, fetched and verified."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtier.tier.blobs.names import SpanName
from kvtier.tier.blobs.payload import SpanLayout
from kvtier.tier.client import TierClient
from kvtier.tier.link.link import TierLink
from kvtier.tier.transport.landing import Landing, Offer

# Longer calls outlive their leases and deadlines; shorter ones cost more calls.
BLOBS_PER_GET = 32


@dataclass(frozen=True)
class Layouts:
    """The layouts in which this server reads spans. whole: of a span of `whole.num_tokens`
    tokens."""

    whole: SpanLayout

    def of(self, span: SpanName) -> SpanLayout:
        """The layout of a span of any length."""
        whole, tokens = self.whole, span.stop - span.begin
        scores = whole.score_bytes // whole.num_tokens * tokens
        return SpanLayout(
            whole.dtype, whole.num_layers, tokens, whole.num_kv_heads, whole.head_dim, scores
        )


@dataclass
class HostSpans:
    """Spans that follow each other, all landed. payloads[i]: uint8 `[bytes]` of spans[i].

    Holds host memory of the link until `release`; may be passed between threads, not shared.
    """

    spans: list[SpanName]
    payloads: list[np.ndarray]
    link: TierLink = field(repr=False)
    host_bytes: int

    def release(self) -> None:
        """Give the memory back; the payloads are gone. Calling it again does nothing."""
        self.link.release(self.host_bytes)
        self.host_bytes = 0
        self.spans, self.payloads = [], []


def fetch_spans(
    client: TierClient, link: TierLink, spans: Sequence[SpanName], layouts: Layouts
) -> HostSpans | None:
    """Fetch as many of the spans as land, from the first on; None where there is no host memory.

    Blocks; raises TierError like the client.
    """
    sizes = [layouts.of(span).num_bytes for span in spans]
    total = sum(sizes)
    if not total or not link.claim(total):
        return None
    host = HostSpans(list(spans), _buffers(sizes), link, total)
    try:
        count = _land(client, host, layouts)
    except BaseException:
        host.release()
        raise
    del host.spans[count:], host.payloads[count:]
    return host


def _land(client: TierClient, host: HostSpans, layouts: Layouts) -> int:
    """Fetch the spans into their buffers and return how many landed, from the first on."""
    count = 0
    for first in range(0, len(host.spans), BLOBS_PER_GET):
        part = host.spans[first : first + BLOBS_PER_GET]
        payloads = host.payloads[first : first + BLOBS_PER_GET]
        encoded = [layouts.of(span).encode() for span in part]

        def land(
            offer: Offer, payloads: list[np.ndarray] = payloads, encoded: list[bytes] = encoded
        ) -> memoryview | None:
            payload = payloads[offer.position]
            fits = offer.layout == encoded[offer.position] and offer.num_bytes == payload.nbytes
            return payload.data if fits else None

        expected = sum(payload.nbytes for payload in payloads)
        for outcome in client.get([span.key for span in part], land, expected):
            if outcome is not Landing.LANDED:
                return count
            count += 1
    return count


def _buffers(sizes: Sequence[int]) -> list[np.ndarray]:
    """Uninitialised host memory, in one allocation."""
    memory = np.frombuffer(mmap.mmap(-1, sum(sizes)), dtype=np.uint8)
    ends = np.cumsum(sizes)
    return [memory[end - size : end] for end, size in zip(ends, sizes, strict=True)]


__all__ = ["HostSpans", "Layouts", "fetch_spans"]

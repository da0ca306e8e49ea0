"""The messages of a near-data refresh on the wire: a context and a rule, queries, chosen entries.

Both ends are here, so that what one writes is what the other reads; see `Refresh` and
`EntriesLayout` in proto/kvtier/v1/tier.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from kvtier.errors import TierProtocolError, UsageError
from kvtier.retention.keepkv import KeepKV, QueryWindow
from kvtier.retention.refreshing import Chosen, PrunedRange, RefreshRule
from kvtier.tier.blobs.names import SpanName
from kvtier.tier.blobs.payload import DTYPE_BYTES
from kvtier.v1 import tier_pb2 as pb
from kvtier_kernels.fp8 import narrowed

_VOTE_BYTES = 4
# The most that one call may ask for.
MAX_SPANS = 1 << 16
MAX_POOL_WIDTH = 1025


class Context(NamedTuple):
    """The subject of one call: where the exact KV is, and what is chosen from it, how."""

    spans: Sequence[SpanName]
    ranges: Sequence[PrunedRange]
    rule: RefreshRule

    def encode(self) -> pb.RefreshContext:
        keepkv = self.rule.keepkv
        return pb.RefreshContext(
            spans=[pb.ContextSpan(key=s.key, begin=s.begin, stop=s.stop) for s in self.spans],
            ranges=[pb.PrunedRange(begin=h.begin, end=h.end, kept=h.kept) for h in self.ranges],
            rule=pb.RefreshRule(
                floor=keepkv.floor,
                window_queries=keepkv.window_queries,
                alpha=keepkv.alpha,
                pool_width=keepkv.pool_width,
                merges=self.rule.merges,
            ),
        )


def decode_context(message: pb.RefreshContext) -> Context:
    """Raises UsageError for what makes no sense."""
    spans = [SpanName(one.key, one.begin, one.stop) for one in message.spans]
    if len(spans) > MAX_SPANS:
        raise UsageError("spans", f"at most {MAX_SPANS}", len(spans))
    for span in spans:
        if not span.begin < span.stop:
            raise UsageError("span", "begin < stop", (span.begin, span.stop))
    rule = message.rule
    keepkv = KeepKV(
        floor=rule.floor,
        window_queries=rule.window_queries,
        alpha=rule.alpha,
        pool_width=rule.pool_width,
    )
    if keepkv.pool_width > MAX_POOL_WIDTH:
        raise UsageError("pool_width", f"at most {MAX_POOL_WIDTH}", keepkv.pool_width)
    ranges = [PrunedRange(one.begin, one.end, one.kept) for one in message.ranges]
    for one, next_one in pairwise(ranges):
        # Without this check a small message could ask for the work of many contexts.
        if next_one.begin < one.end:
            raise UsageError("ranges", "in order and disjoint", (one.end, next_one.begin))
    return Context(spans, ranges, RefreshRule(keepkv, rule.merges))


def encode_queries(
    key: bytes, layer: int, heads: Sequence[int], window: QueryWindow
) -> pb.RefreshQueries:
    """heads: the KV heads of the window, in its order."""
    q = window.q.detach().cpu().contiguous()
    return pb.RefreshQueries(
        key=key,
        layer=layer,
        heads=heads,
        group=q.shape[2],
        scale=window.scale,
        dtype=str(q.dtype).removeprefix("torch."),
        queries=q.view(torch.uint8).numpy().tobytes(),
    )


def decode_queries(message: pb.RefreshQueries, head_dim: int) -> QueryWindow:
    """Raises UsageError for what makes no sense."""
    row = len(message.heads) * message.group * head_dim
    if message.dtype not in DTYPE_BYTES or not row:
        raise UsageError("queries", "heads, a group and a dtype", (row, message.dtype))
    if not message.queries or len(message.queries) % (row * DTYPE_BYTES[message.dtype]):
        raise UsageError("queries", f"rows of {row} {message.dtype}", len(message.queries))
    dtype: torch.dtype = getattr(torch, message.dtype)
    q = torch.frombuffer(bytearray(message.queries), dtype=dtype)
    return QueryWindow(q.view(-1, len(message.heads), message.group, head_dim), message.scale)


@dataclass(frozen=True)
class Entries:
    """The layout of the entries that are chosen of a layer, as bytes; see EntriesLayout.

    dtype: torch's name without `torch.`; num_entries: of each pruned range, as the rule says.
    """

    dtype: str
    num_entries: tuple[int, ...]
    num_heads: int
    group: int
    head_dim: int
    voted: bool

    @property
    def num_bytes(self) -> int:
        """The size of the payload."""
        return sum(self._vote_bytes(n) + 2 * self._side_bytes(n) for n in self.num_entries)

    def _vote_bytes(self, entries: int) -> int:
        return _VOTE_BYTES * self.num_heads * self.group * entries if self.voted else 0

    def _side_bytes(self, entries: int) -> int:
        return self.num_heads * entries * self.head_dim * DTYPE_BYTES[self.dtype]

    def layout(self) -> bytes:
        """The serialized kvtier.v1.Layout."""
        entries = pb.EntriesLayout(
            dtype=self.dtype,
            num_entries=self.num_entries,
            num_heads=self.num_heads,
            group=self.group,
            head_dim=self.head_dim,
            voted=self.voted,
        )
        return pb.Layout(entries=entries).SerializeToString(deterministic=True)

    def encode(self, chosen: Sequence[Chosen]) -> np.ndarray:
        """The payload, uint8 `[num_bytes]`. chosen: of each pruned range, of this layout but for
        the dtype of its keys and values."""
        parts = []
        dtype: torch.dtype = getattr(torch, self.dtype)
        for one in chosen:
            votes = [] if one.log_votes is None else [one.log_votes]
            sides = [narrowed(side, dtype) for side in (one.k, one.v)]
            parts += [_bytes(tensor) for tensor in (*votes, *sides)]
        payload = np.concatenate(parts) if parts else np.empty(0, np.uint8)
        assert payload.nbytes == self.num_bytes, "entries of another layout"
        return payload

    def decode(self, payload: np.ndarray) -> list[Chosen]:
        """The inverse of `encode`. Raises TierProtocolError for bytes of another number."""
        if payload.nbytes != self.num_bytes:
            raise TierProtocolError(f"{payload.nbytes} bytes of entries, not {self.num_bytes}")
        chosen, at = [], 0
        dtype: torch.dtype = getattr(torch, self.dtype)

        def take(num_bytes: int) -> torch.Tensor:
            nonlocal at
            at += num_bytes
            # A copy: what stands before it may leave it on an odd address.
            return torch.from_numpy(payload[at - num_bytes : at].copy())

        for n in self.num_entries:
            votes = None
            if self.voted:
                votes = take(self._vote_bytes(n)).view(torch.float32)
                votes = votes.view(self.num_heads, self.group, n)
            k, v = (
                take(self._side_bytes(n)).view(dtype).view(self.num_heads, n, self.head_dim)
                for _ in range(2)
            )
            chosen.append(Chosen(k, v, votes))
        return chosen


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    flat: np.ndarray = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return flat

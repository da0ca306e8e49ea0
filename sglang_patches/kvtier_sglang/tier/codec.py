"""The codec between the pool's slots and the tier's payloads: every head's exact KV of whole spans.

    pool     [slots, KV heads, dim] per layer
    payload  one span: [layers, 2, tokens, KV heads, dim] and, where the pool is scored,
             state per layer [KV heads, tokens] float32, then nll [tokens] float32

Payloads are put together, and taken apart, where the pool is: each is copied once between device
and host. All but `copy` runs in the scheduler's thread only, like the pool.
"""

from __future__ import annotations

import torch

from kvtier.tier.blobs.payload import SpanLayout
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool
from kvtier_sglang.streams import HostPayload, SideCopies


class SpanCodec:
    """The encoder and decoder of one pool's slots."""

    def __init__(self, pool: HeadPagedKVPool) -> None:
        self.pool = pool
        self._copies = SideCopies(torch.device(pool.device))

    def layout(self, num_tokens: int) -> SpanLayout:
        """Return the layout of a payload of that many tokens."""
        pool = self.pool
        scores = 0
        if pool.state is not None:
            scores = 4 * num_tokens * (1 + sum(state.shape[0] for state in pool.state))
        return SpanLayout(
            dtype=str(pool.dtype).removeprefix("torch."),
            num_layers=pool.layer_num,
            num_tokens=num_tokens,
            num_kv_heads=pool.head_num,
            head_dim=pool.head_dim,
            score_bytes=scores,
        )

    def exact_spans(self, slots: torch.Tensor, num_spans: int, blank: int = 0) -> list[bool]:
        """Return for each of some equal spans that follow each other whether every head still holds
        the own KV of each of its tokens. blank: so many of the first span's tokens have none, and
        are not asked about."""
        exact = slots > 0
        if self.pool.packed is not None:
            exact &= self.pool.packed.dense_of[slots] > 0
        exact = exact.view(num_spans, -1)
        exact[0, :blank] = True
        found: list[bool] = exact.all(1).tolist()
        return found

    def gather(self, slots: torch.Tensor, num_spans: int, blank: int = 0) -> HostPayload:
        """Return payloads of equal spans that follow each other: uint8 `[spans, bytes]`, on the
        host.

        slots: [spans * tokens] int64, all exact; they may be written to afterwards. blank: see
        `exact_spans`; zeros are stored for those.
        """
        tokens = slots.numel() // num_spans
        layout = self.layout(tokens)
        shape = (num_spans, layout.num_bytes)
        payload = torch.empty(shape, dtype=torch.uint8, device=self.pool.device)
        kv, state, nll = self._views(payload, layout)
        for index, layer in enumerate(self.pool.kv):
            for side, source in enumerate(layer.sides):
                kv[:, index, side] = _spans(source[slots], num_spans)
        if self.pool.state is not None:
            for target, held in zip(state, self.pool.state, strict=True):
                found = _spans(held[:, slots].T, num_spans)
                target.copy_(found.transpose(1, 2))
            nll.copy_(self.pool.nll[slots].view(num_spans, tokens))
        if blank:
            kv[0, :, :, :blank] = 0
            nll[0, :blank] = 0
            for scores in state:
                scores[0, :, :blank] = 0
        return self._copies.to_host(payload)

    def scatter(
        self, payload: torch.Tensor, num_tokens: int, begin: int, slots: torch.Tensor
    ) -> None:
        """Write tokens [begin, begin + slots) of one span's payload into slots.

        payload: uint8 `[bytes]`; num_tokens: those of the span; slots: int64, freshly allocated.
        """
        layout = self.layout(num_tokens)
        kv, state, nll = self._views(self._copies.to_device(payload).unsqueeze(0), layout)
        rows = slice(begin, begin + slots.numel())
        for index, layer in enumerate(self.pool.kv):
            for side, target in enumerate(layer.sides):
                target[slots] = kv[0, index, side, rows]
        if self.pool.state is not None:
            for source, held in zip(state, self.pool.state, strict=True):
                held[:, slots] = source[0, :, rows]
            self.pool.nll[slots] = nll[0, rows]

    def copy(
        self,
        source: torch.Tensor,
        source_tokens: int,
        target: torch.Tensor,
        target_tokens: int,
        count: int,
    ) -> None:
        """Copy the first `count` tokens of one payload into another one, uint8 `[1, bytes]` each
        on the host. Any thread may call it."""
        read = self._views(source, self.layout(source_tokens))
        written = self._views(target, self.layout(target_tokens))
        written[0][:, :, :, :count] = read[0][:, :, :, :count]
        for here, there in zip((*written[1], written[2]), (*read[1], read[2]), strict=True):
            here[..., :count] = there[..., :count]

    def _views(
        self, payload: torch.Tensor, layout: SpanLayout
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Return views of KV, state per layer and nll inside `payload` [spans, bytes]."""
        spans, tokens = payload.shape[0], layout.num_tokens
        kv = payload[:, : layout.kv_bytes].view(self.pool.store_dtype)
        kv = kv.view(spans, *layout.shape)
        scores = payload[:, layout.kv_bytes :].view(torch.float32)
        state, position = [], 0
        for held in self.pool.state or ():
            heads = held.shape[0]
            part = scores[:, position : position + heads * tokens]
            state.append(part.as_strided((spans, heads, tokens), (scores.stride(0), tokens, 1)))
            position += heads * tokens
        nll = scores[:, position:] if self.pool.state is not None else scores.view(spans, 0)
        return kv, state, nll


def _spans(rows: torch.Tensor, num_spans: int) -> torch.Tensor:
    """Return rows [spans * tokens, ...] as [spans, tokens, ...]."""
    return rows.reshape(num_spans, rows.shape[0] // num_spans, *rows.shape[1:])

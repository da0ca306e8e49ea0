"""Reading on behind a context while every attention weight is looked at: a KV head of CHUNK_TOKENS
queries at a time, so that nothing is ever context × context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvtier.heads.model.config import layer_sinks, layer_windows
from kvtier.heads.probes.row import row_of
from kvtier.heads.reference.attention import attending, softmax_with_sinks
from kvtier.heads.samples.questions import Question

# Queries of a pass; their weights over the context are in memory, one KV head at a time.
CHUNK_TOKENS = 512

LayerKV = tuple[Tensor, Tensor]
"""A layer's rotated keys and values of a context, `[kv_heads, tokens, dim]` each."""

Watch = Callable[[int, int, slice, Tensor], None]
"""A callback (layer, KV head, which of the new tokens ask, their attention weights `[group, asking,
context's and new tokens]`) of layers without a window."""


class _Watched:
    """Attention of new tokens over a context and themselves."""

    def __init__(self, model: Any, kv: Sequence[LayerKV], watch: Watch) -> None:
        self.kv, self.watch = kv, watch
        self.windows, self.sinks = layer_windows(model), layer_sinks(model)

    def attend(
        self, layer: int, q: Tensor, own: LayerKV, sees: Tensor, at: Tensor, scale: float
    ) -> Tensor:
        """q `[1, heads, rows, dim]` over the context and own keys and values
        `[kv_heads, n, dim]`; sees: `[rows, n]`, added to the logits of those; at: their positions
        `[n]`, the last of which are the rows'."""
        context, out, window = self.kv[layer], torch.empty_like(q), self.windows[layer]
        sinks = self.sinks.get(layer)
        heads, tokens, _ = context[0].shape
        grouped, answers = (x[0].unflatten(0, (heads, -1)) for x in (q, out))
        keys_at, rows_at = torch.cat([torch.arange(tokens, device=q.device), at]), at[-q.shape[2] :]
        before = len(at) - len(rows_at)
        for head in range(heads):
            keys, values = (
                torch.cat([x[head], y[head]]) for x, y in zip(context, own, strict=True)
            )
            for begin in range(0, q.shape[2], CHUNK_TOKENS):
                some = slice(begin, min(begin + CHUNK_TOKENS, q.shape[2]))
                logits = grouped[head, :, some] @ keys.T * scale
                logits[..., tokens:] += sees[some]
                if window is not None:
                    left = keys_at <= rows_at[some, None] - window
                    logits = logits.masked_fill(left, -torch.inf)
                weights = softmax_with_sinks(logits, None if sinks is None else sinks[head])
                answers[head, :, some] = weights @ values
                if window is None:
                    asking = slice(before + some.start, before + some.stop)
                    self.watch(layer, head, asking, weights)
        return out


@torch.inference_mode()
def read(model: Any, kv: Sequence[LayerKV], ids: Sequence[int], watch: Watch) -> None:
    """Have a model read tokens behind a context of which `kv` is, layer by layer."""
    watched, own = _Watched(model, kv, watch), dict[int, LayerKV]()
    tokens = kv[0][0].shape[1]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        new = (k[0], v[0])
        if layer in own:
            new = (torch.cat([own[layer][0], k[0]], 1), torch.cat([own[layer][1], v[0]], 1))
        own[layer] = new
        rows, before = q.shape[2], new[0].shape[1] - q.shape[2]
        ahead = q.new_full((rows, rows), -torch.inf).triu(1)
        sees = torch.cat([q.new_zeros(rows, before), ahead], dim=1)
        at = tokens + torch.arange(new[0].shape[1], device=q.device)
        return watched.attend(layer, q, new, sees, at, scale)

    with attending(model, attend, varied=True):
        for begin in range(0, len(ids), CHUNK_TOKENS):
            part = torch.tensor([list(ids[begin : begin + CHUNK_TOKENS])], device=model.device)
            first = tokens + begin
            positions = torch.arange(first, first + part.shape[1], device=model.device)[None]
            model(part, position_ids=positions, use_cache=False, logits_to_keep=1)


@torch.inference_mode()
def ask(model: Any, kv: Sequence[LayerKV], questions: Sequence[Question], watch: Watch) -> None:
    """Have a model read questions and their answers, each alone behind the context; asking tokens
    are those of one row (`kvtier.heads.probes.row`)."""
    watched, row = _Watched(model, kv, watch), row_of(questions, kv[0][0].shape[1], model.device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return watched.attend(layer, q, (k[0], v[0]), row.sees, row.positions, scale)

    with attending(model, attend, varied=True):
        row.logits(model)

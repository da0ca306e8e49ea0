"""Exact long contexts without a T×T matrix: their KV, and turns that see it under a head policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier.heads.reference.attention import AttentionState, Block, attend, attend_own, mean_entry
from models.net import Layer, Net, rope_tables

SINK_TOKENS = 128
RECENT_TOKENS = 256
CHUNK_TOKENS = 2048


@dataclass(frozen=True)
class ContextCache:
    """Rotated keys and values of a context: per layer `[kv_heads, tokens, dim]`."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def num_tokens(self) -> int:
        return self.keys[0].shape[1]


def _project(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`x` `[tokens, hidden]` → q `[kv_heads, group, tokens, dim]`, k, v `[kv_heads, n, dim]`."""
    q, k, v = layer.project(x[None], cos, sin)
    return q[0].unflatten(0, (k.shape[1], -1)), k[0], v[0]


def _finish(layer: Layer, x: Tensor, state: AttentionState) -> Tensor:
    out = state.out.reshape(1, -1, len(x), state.out.shape[-1])
    return layer.finish(x[None], out)[0]


@torch.no_grad()
def prefill(net: Net, ids: Tensor, chunk_tokens: int = CHUNK_TOKENS) -> ContextCache:
    """KV of the context `ids` `[tokens]` under full causal attention."""
    config = net.config
    shape = (config.num_kv_heads, len(ids), config.head_dim)
    keys = tuple(torch.empty(shape) for _ in net.layers)
    values = tuple(torch.empty(shape) for _ in net.layers)
    last, scale = len(net.layers) - 1, config.head_dim**-0.5
    for start in range(0, len(ids), chunk_tokens):
        stop = min(start + chunk_tokens, len(ids))
        cos, sin = rope_tables(config, torch.arange(start, stop))
        x = net.model.embed_tokens(ids[start:stop])
        for index, layer in enumerate(net.layers):
            q, k, v = _project(layer, x, cos, sin)
            keys[index][:, start:stop], values[index][:, start:stop] = k, v
            if index == last:
                break  # only the KV is wanted
            state = attend_own(q, k, v, scale)
            if start:
                before = Block(keys[index][:, :start], values[index][:, :start])
                state = state.merge(attend(q.flatten(1, 2), before, scale))
            x = _finish(layer, x, state)
    return ContextCache(keys, values)


def attend_context(
    q: Tensor, k: Tensor, v: Tensor, anchored: Tensor, scale: float
) -> AttentionState:
    """Attention of one layer to a context, q `[kv_heads, rows, dim]`.

    anchored: bool `[kv_heads]`, the CA heads; the others see sink, recent window and the
    compensation entry
    """
    stop = k.shape[1] - RECENT_TOKENS
    if stop <= SINK_TOKENS or bool(anchored.all()):
        return attend(q, Block(k, v), scale)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1])
    if bool(anchored.any()):
        out[anchored], lse[anchored] = attend(q[anchored], Block(k[anchored], v[anchored]), scale)
    q, k, v = (x[~anchored] for x in (q, k, v))
    state = attend(q, mean_entry(k[:, SINK_TOKENS:stop], v[:, SINK_TOKENS:stop]), scale)
    for part in (slice(SINK_TOKENS), slice(stop, None)):
        state = state.merge(attend(q, Block(k[:, part], v[:, part]), scale))
    out[~anchored], lse[~anchored] = state
    return AttentionState(out, lse)


@torch.no_grad()
def turn_hidden(net: Net, cache: ContextCache, turn_ids: Tensor, anchored: Tensor) -> Tensor:
    """Final hidden states `[tokens, hidden]` of all turns, which follow the context directly.

    `anchored` bool `[layers, kv_heads]`; turns see the context under that policy and each other
    fully.
    """
    start, scale = cache.num_tokens, net.config.head_dim**-0.5
    cos, sin = rope_tables(net.config, torch.arange(start, start + len(turn_ids)))
    x = net.model.embed_tokens(turn_ids)
    for index, layer in enumerate(net.layers):
        q, k, v = _project(layer, x, cos, sin)
        keys, values = cache.keys[index], cache.values[index]
        state = attend_context(q.flatten(1, 2), keys, values, anchored[index], scale)
        x = _finish(layer, x, state.merge(attend_own(q, k, v, scale)))
    return net.model.norm(x)

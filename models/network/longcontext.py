"""Prefill a long context exactly, in chunks, and answer turns over it under a head policy.

context KV     | sink 128 |           middle            | recent 256 |
CA head        | ######## | ########################### | ########## |  + turns
locality head  | ######## |   one compensation entry    | ########## |  + turns
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.network.attention import AttentionState, attend, attend_entry
from models.network.net import Layer, Net, rope_tables

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
    return layer.finish(x[None], state.out.flatten(0, 1)[None])[0]


@torch.no_grad()
def prefill(net: Net, ids: Tensor, chunk_tokens: int = CHUNK_TOKENS) -> ContextCache:
    """KV of the context `ids` `[tokens]` under full causal attention."""
    config = net.config
    shape = (config.num_kv_heads, len(ids), config.head_dim)
    keys = tuple(torch.empty(shape) for _ in net.layers)
    values = tuple(torch.empty(shape) for _ in net.layers)
    last = len(net.layers) - 1
    for start in range(0, len(ids), chunk_tokens):
        stop = min(start + chunk_tokens, len(ids))
        cos, sin = rope_tables(config, torch.arange(start, stop))
        x = net.model.embed_tokens(ids[start:stop])
        for index, layer in enumerate(net.layers):
            q, k, v = _project(layer, x, cos, sin)
            keys[index][:, start:stop], values[index][:, start:stop] = k, v
            if index == last:
                break  # only the KV is wanted
            state = attend(q, k, v, causal=True)
            if start:
                state = state.merge(attend(q, keys[index][:, :start], values[index][:, :start]))
            x = _finish(layer, x, state)
    return ContextCache(keys, values)


def attend_context(q: Tensor, k: Tensor, v: Tensor, anchored: Tensor) -> AttentionState:
    """Context attention of one layer; `anchored` bool `[kv_heads]` marks the CA heads."""
    middle = k.shape[1] - SINK_TOKENS - RECENT_TOKENS
    if middle <= 0 or bool(anchored.all()):
        return attend(q, k, v)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1])
    if bool(anchored.any()):
        out[anchored], lse[anchored] = attend(q[anchored], k[anchored], v[anchored])
    local = ~anchored
    out[local], lse[local] = attend_locally(q[local], k[local], v[local])
    return AttentionState(out, lse)


def attend_locally(q: Tensor, k: Tensor, v: Tensor) -> AttentionState:
    """Attend as a locality head does to what it sees of a context: sink, recent window,
    compensation entry."""
    stop = k.shape[1] - RECENT_TOKENS
    mean_k, mean_v = k[:, SINK_TOKENS:stop].mean(1), v[:, SINK_TOKENS:stop].mean(1)
    state = attend(q, k[:, :SINK_TOKENS], v[:, :SINK_TOKENS])
    state = state.merge(attend(q, k[:, stop:], v[:, stop:]))
    return state.merge(attend_entry(q, mean_k, mean_v, votes=stop - SINK_TOKENS))


@torch.no_grad()
def turn_hidden(net: Net, cache: ContextCache, turn_ids: Tensor, anchored: Tensor) -> Tensor:
    """Final hidden states `[tokens, hidden]` of all turns, which follow the context directly.

    `anchored` bool `[layers, kv_heads]`; turns see the context under that policy and each other
    fully.
    """
    start = cache.num_tokens
    cos, sin = rope_tables(net.config, torch.arange(start, start + len(turn_ids)))
    x = net.model.embed_tokens(turn_ids)
    for index, layer in enumerate(net.layers):
        q, k, v = _project(layer, x, cos, sin)
        state = attend_context(q, cache.keys[index], cache.values[index], anchored[index])
        x = _finish(layer, x, state.merge(attend(q, k, v, causal=True)))
    return net.model.norm(x)

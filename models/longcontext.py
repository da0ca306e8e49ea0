"""Exact attention over long contexts without a T×T matrix: attention states and their merge.

An attention state is `(out, lse)`: the normalised output of queries over one block of keys and the
log-sum-exp of their logits.  Two blocks merge exactly:

    lse = logaddexp(lse1, lse2)      out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models.net import Layer, Net, rope_tables


class AttentionState(NamedTuple):
    """`out` `[kv_heads, group, tokens, dim]`, `lse` (natural log) `[kv_heads, group, tokens]`."""

    out: Tensor
    lse: Tensor

    def merge(self, other: AttentionState) -> AttentionState:
        """The state over both blocks of keys."""
        lse = torch.logaddexp(self.lse, other.lse)
        mine, theirs = torch.exp(self.lse - lse), torch.exp(other.lse - lse)
        out = self.out * mine.unsqueeze(-1) + other.out * theirs.unsqueeze(-1)
        return AttentionState(out, lse)


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> AttentionState:
    """Every query over one block: q `[kv_heads, group, tokens, dim]`, k and v `[kv_heads, n, dim]`.

    Causal attention needs `n == tokens`; the group then cannot share one row axis.
    """
    heads, group, tokens, dim = q.shape
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if causal:
        shape = (heads, group, k.shape[1], dim)
        k4, v4 = k.unsqueeze(1).expand(shape), v.unsqueeze(1).expand(shape)
        out, lse = flash(q, k4, v4, 0.0, True)
    else:
        out, lse = flash(q.reshape(1, heads, group * tokens, dim), k[None], v[None], 0.0, False)
    return AttentionState(
        out.view(heads, group, tokens, dim), _lse_shape(lse, heads, group, tokens)
    )


def _lse_shape(lse: Tensor, heads: int, group: int, tokens: int) -> Tensor:
    return lse.reshape(heads, group, tokens)


def attend_entry(q: Tensor, k: Tensor, v: Tensor, votes: float) -> AttentionState:
    """Every query over one entry per KV head, k and v `[kv_heads, dim]`, with `votes` votes."""
    scale = 1.0 / math.sqrt(q.shape[-1])
    lse = torch.einsum("hgtd,hd->hgt", q, k) * scale + math.log(votes)
    out = v[:, None, None, :].expand_as(q)
    return AttentionState(out, lse)


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

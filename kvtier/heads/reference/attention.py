"""Attention of the reference implementation: streamed over blocks of keys, merged by log-sum-exp.

It runs any Llama-like model through transformers' attention registry and shares no code with the
engine.  No matrix is ever context × context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvtier.errors import UnsupportedModelError

KEY_BLOCK = 1024

AttendLayer = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]


class AttentionState(NamedTuple):
    """`out` `[heads, rows, dim]` and `lse` `[heads, rows]` (natural log) over one block of keys."""

    out: Tensor
    lse: Tensor

    def merge(self, other: AttentionState) -> AttentionState:
        """The state over both blocks; commutative and associative up to rounding."""
        lse = torch.logaddexp(self.lse, other.lse)
        mine, theirs = torch.exp(self.lse - lse), torch.exp(other.lse - lse)
        out = self.out * mine.unsqueeze(-1) + other.out * theirs.unsqueeze(-1)
        return AttentionState(out, lse)


class Block(NamedTuple):
    """Rotated keys and values `[heads, entries, dim]`; `log_votes` is added to every logit. at: the
    entries' positions `[entries]`, where somebody wants them."""

    k: Tensor
    v: Tensor
    log_votes: float = 0.0
    at: Tensor | None = None

    def between(self, begin: int, stop: int) -> Block:
        """The entries of the positions from `begin` to `stop`."""
        assert self.at is not None, "a block without positions"
        mine = (begin <= self.at) & (self.at < stop)
        return Block(self.k[:, mine], self.v[:, mine], at=self.at[mine])


def joined(blocks: Sequence[Block]) -> tuple[Tensor, Tensor]:
    """Keys and values of blocks without votes."""
    return torch.cat([b.k for b in blocks], dim=1), torch.cat([b.v for b in blocks], dim=1)


def with_sinks(state: AttentionState, sinks: Tensor | None) -> AttentionState:
    """The state over what heads give to nothing, too; as it is where they do not.

    state: its rows as of `attend_own`; sinks: `[heads, group]`, the logits of that
    """
    if sinks is None:
        return state
    logits = sinks.float().repeat_interleave(state.lse.shape[1] // sinks.shape[1], dim=1)
    return state.merge(AttentionState(torch.zeros_like(state.out), logits))


def mean_entry(k: Tensor, v: Tensor) -> Block:
    """One entry that stands for all of `k`, `v` `[heads, n, dim]` with n votes."""
    return Block(k.mean(1, keepdim=True), v.mean(1, keepdim=True), math.log(k.shape[1]))


def attend(q: Tensor, block: Block, scale: float) -> AttentionState:
    """Every query `[heads, rows, dim]` over every entry of the block."""
    if _has_tiled_kernel(q):
        out, lse = _flash(q, block.k, block.v, scale, causal=False)
    else:
        out, lse = _streamed(q, block.k, block.v, scale, None)
    return AttentionState(out, lse + block.log_votes)


def attend_own(q: Tensor, k: Tensor, v: Tensor, scale: float) -> AttentionState:
    """Causal attention of new tokens among themselves.

    q:    `[heads, group, tokens, dim]`; k, v: `[heads, tokens, dim]`
    Returns the state with rows = group × tokens, the tokens running fastest.
    """
    heads, group, tokens, dim = q.shape
    if _has_tiled_kernel(q):
        wide = (heads, group, tokens, dim)
        flat = (heads * group, tokens, dim)
        k, v = (t.unsqueeze(1).expand(wide).reshape(flat) for t in (k, v))
        out, lse = _flash(q.reshape(flat), k, v, scale, causal=True)
        return AttentionState(out.reshape(heads, -1, dim), lse.reshape(heads, -1))
    rows = torch.arange(tokens, device=q.device).repeat(group)
    return AttentionState(*_streamed(q.reshape(heads, -1, dim), k, v, scale, rows))


def attend_window(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """New tokens over the last `window` tokens up to each.

    q: `[heads, group, tokens, dim]`; k, v: `[heads, entries, dim]`, the last of them the tokens'
    own; sinks: as of `with_sinks`. Returns the output, as q.
    """
    tokens, entries = q.shape[2], k.shape[1]
    at = torch.arange(entries, device=q.device)
    parts = []
    for begin in range(0, tokens, KEY_BLOCK):
        end = min(begin + KEY_BLOCK, tokens)
        own = at[entries - tokens + begin : entries - tokens + end, None]
        logits = (q[:, :, begin:end].float() * scale) @ k.float()[:, None].transpose(2, 3)
        logits.masked_fill_((at > own) | (at <= own - window), -torch.inf)
        weights = softmax_with_sinks(logits, sinks)
        parts.append((weights @ v.float()[:, None]).to(q.dtype))
    return torch.cat(parts, dim=2)


def softmax_with_sinks(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of logits `[..., rows, entries]`, which leaves to nothing what sinks `[...]` ask."""
    if sinks is None:
        return logits.softmax(-1)
    nothing = sinks.to(logits.dtype)[..., None, None].expand(*logits.shape[:-1], 1)
    return torch.cat([logits, nothing], -1).softmax(-1)[..., :-1]


def _has_tiled_kernel(q: Tensor) -> bool:
    return q.device.type == "cpu"


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """PyTorch's tiled CPU kernel, called where it still returns the log-sum-exp."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), 0.0, causal, scale=scale
    )
    return out.squeeze(0), lse.reshape(q.shape[:-1])


def _streamed(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal_rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch, for every other device: one block of keys at a time.

    causal_rows: `[rows]`, the last key index each row may see; None for all keys.
    """
    state: AttentionState | None = None
    for start in range(0, k.shape[1], KEY_BLOCK):
        stop = min(start + KEY_BLOCK, k.shape[1])
        logits = torch.matmul(q.float() * scale, k[:, start:stop].float().transpose(1, 2))
        if causal_rows is not None:
            keys = torch.arange(start, stop, device=q.device)
            # Finite, so that a row that sees nothing of this block stays free of NaN.
            logits.masked_fill_(keys > causal_rows[:, None], torch.finfo(logits.dtype).min)
        lse = torch.logsumexp(logits, dim=-1)
        weights = torch.exp(logits - lse.unsqueeze(-1))
        part = AttentionState(torch.matmul(weights, v[:, start:stop].float()), lse)
        state = part if state is None else state.merge(part)
    assert state is not None, "attention over no keys at all"
    return state.out.to(q.dtype), state.lse


@contextmanager
def attending(model: Any, attend_layer: AttendLayer, *, varied: bool = False) -> Iterator[None]:
    """Have every attention layer of `model` call `attend_layer(layer, q, k, v, scale)` instead
    within this context, on rotated q `[batch, heads, tokens, dim]` and k, v
    `[batch, kv_heads, tokens, dim]` of the new tokens, for an output shaped like q. varied: whether
    it computes windows and sinks where layers have them.

    One context per model at a time; not for several threads.  Undone on exit, errors included.
    """

    def forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: object, **options: Any
    ) -> tuple[Tensor, None]:
        for name in ("softcap",) if varied else ("sliding_window", "softcap", "s_aux"):
            if options.get(name) is not None:
                raise UnsupportedModelError("--model-path", "plain full attention", name)
        out = attend_layer(module.layer_idx, query, key, value, float(options["scaling"]))
        return out.to(query.dtype).transpose(1, 2).contiguous(), None

    name, before = f"kvtier-{id(forward)}", model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[name] = forward
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before
        del ALL_ATTENTION_FUNCTIONS[name]

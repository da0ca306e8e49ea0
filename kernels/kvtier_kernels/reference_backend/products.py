"""Products of queries with keys and values: the states that attention is made of."""

from __future__ import annotations

import torch

from kvtier_kernels.base import AttentionState, RaggedKV
from kvtier_kernels.fp8 import take
from kvtier_kernels.reference_backend.slots import RequestSlots
from kvtier_kernels.states import empty_state, merge_states

# Logits held at a time where no tiled operator exists: 64 M float32.
BLOCK_LOGITS = 1 << 26


def over_entries(
    q: torch.Tensor, kv: RaggedKV, request: RequestSlots, scale: float
) -> AttentionState:
    """Unmasked attention of q [rows, heads, group, dim] over the entries of one request."""
    state = None
    for start, stop in request.runs:
        k, v = kv.k[start:stop].to(q.dtype), kv.v[start:stop].to(q.dtype)
        part = dense(q, k, v, None, scale)
        state = part if state is None else merge_states(state, part)
    if request.scattered is not None:
        k, v = (take(x, 0, request.scattered).to(q.dtype) for x in (kv.k, kv.v))
        bias = None
        if request.voted and kv.log_votes is not None:
            bias = kv.log_votes.index_select(0, request.scattered)
        part = dense(q, k, v, bias, scale)
        state = part if state is None else merge_states(state, part)
    return empty_state(q) if state is None else state


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
) -> AttentionState:
    """q [rows, heads, group, dim] over k, v [entries, heads, dim], every entry visible.

    bias: log-votes [entries] or [entries, heads, group], or None.
    """
    if bias is not None and bias.ndim == 3:
        return _dense_per_head(q, k, v, bias, scale)
    rows, heads, group, dim = q.shape
    folded = q.permute(1, 2, 0, 3).reshape(heads, group * rows, dim)
    mask = None if bias is None else bias.expand(1, 1, group * rows, -1)
    o, lse = tiled(folded, k.transpose(0, 1), v.transpose(0, 1), scale, mask=mask)
    return unfold(o, lse, rows, group)


def _dense_per_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float
) -> AttentionState:
    """Over entries whose votes differ by query head: blocks of rows, because the mask that the
    tiled kernel wants is as large as the logits."""
    heads, group, dim = q.shape[1:]
    step = max(1, BLOCK_LOGITS // max(1, heads * group * k.shape[0]))
    by_head = bias.permute(1, 2, 0)
    states = []
    for part in torch.split(q, step):
        folded = part.permute(1, 2, 0, 3).reshape(heads, group * part.shape[0], dim)
        mask = by_head.repeat_interleave(part.shape[0], dim=1).unsqueeze(0)
        o, lse = tiled(folded, k.transpose(0, 1), v.transpose(0, 1), scale, mask=mask)
        states.append(unfold(o, lse, part.shape[0], group))
    return concat(states)


def tiled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [heads, rows, dim] over k, v [heads, entries, dim] -> o, lse; nothing quadratic is held."""
    o, lse = flash(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), scale, causal, mask)
    return o.squeeze(0), lse.squeeze(0)


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, heads, rows, dim] attention returning the LSE, which the public SDPA hides."""
    if q.device.type == "cpu":
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        return o, lse
    return _blockwise(q, k, v, scale, causal, mask)


def _blockwise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flash` for devices without that operator: blocks of entries, merged as they come."""
    rows, entries = q.shape[-2], k.shape[-2]
    step = max(1, BLOCK_LOGITS // max(1, q.shape[:-1].numel()))
    state = None
    for begin in range(0, entries, step):
        end = min(begin + step, entries)
        logits = torch.matmul(q.float(), k[..., begin:end, :].float().transpose(-1, -2)) * scale
        if mask is not None:
            logits = logits + mask[..., begin:end].float()
        if causal:
            ahead = torch.arange(begin, end, device=q.device)
            row = torch.arange(rows, device=q.device).unsqueeze(-1)
            logits = logits.masked_fill(ahead > row, float("-inf"))
        lse = torch.logsumexp(logits, dim=-1)
        shift = torch.where(torch.isinf(lse), torch.zeros_like(lse), lse).unsqueeze(-1)
        part = AttentionState(
            torch.matmul(torch.exp(logits - shift), v[..., begin:end, :].float()), lse
        )
        state = part if state is None else merge_states(state, part)
    assert state is not None, "attention over no entries is the caller's empty state"
    return state.o.to(q.dtype), state.lse


def unfold(o: torch.Tensor, lse: torch.Tensor, rows: int, group: int) -> AttentionState:
    """[heads, group * rows, ...] back to [rows, heads, group, ...]."""
    heads, _, dim = o.shape
    o = o.view(heads, group, rows, dim).permute(2, 0, 1, 3)
    lse = lse.reshape(heads, group, rows).permute(2, 0, 1)
    return AttentionState(o, lse.float())


def concat(states: list[AttentionState]) -> AttentionState:
    if len(states) == 1:
        return states[0]
    return AttentionState(torch.cat([s.o for s in states]), torch.cat([s.lse for s in states]))


__all__ = ["concat", "dense", "flash", "over_entries", "tiled", "unfold"]

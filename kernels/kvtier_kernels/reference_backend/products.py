"""Products of queries with keys and values: the states that attention is made of."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvtier_kernels.base import AttentionState, RaggedKV
from kvtier_kernels.fp8 import take
from kvtier_kernels.reference_backend.slots import RequestSlots
from kvtier_kernels.states import empty_state, merge_states

# Logits held at a time where no tiled operator exists: 64 M float32.
BLOCK_LOGITS = 1 << 26
# Fewer entries of one head than these are not worth a thread of their own.
LONG_ENTRIES = 512
# Gathered at a time, so that they are still in a cache when they are read.
GATHERED_ENTRIES = 4096


def over_entries(
    q: torch.Tensor,
    kv: RaggedKV,
    request: RequestSlots,
    scale: float,
    votes: torch.Tensor | None = None,
) -> AttentionState:
    """Unmasked attention of q [rows, heads, group, dim] over the entries of one request.

    votes: log-votes [slots, query heads] as `dense` has them, of all slots; or None.
    """
    state = None
    for k, v, bias in _blocks(kv, request, votes):
        part = dense(q, k.to(q.dtype), v.to(q.dtype), bias, scale)
        state = part if state is None else merge_states(state, part)
    return empty_state(q) if state is None else state


def _blocks(
    kv: RaggedKV, request: RequestSlots, votes: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Keys, values and votes: runs as they lie, and what is scattered as it is gathered."""
    for start, stop in request.runs:
        yield kv.k[start:stop], kv.v[start:stop], None if votes is None else votes[start:stop]
    if request.scattered is not None:
        for slots in torch.split(request.scattered, GATHERED_ENTRIES):
            bias = None if votes is None else votes[slots]
            yield take(kv.k, 0, slots), take(kv.v, 0, slots), bias


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
) -> AttentionState:
    """q [rows, heads, group, dim] over k, v [entries, heads, dim], every entry visible.

    bias: log-votes [entries, query heads] or [heads, entries, query heads], -inf for what a head
          does not see; or None. Row g of a group has those of query head g % query heads.
    """
    rows, heads, group, dim = q.shape
    threads = torch.get_num_threads() if q.device.type == "cpu" else 1
    if heads == 1 < threads and bias is None and len(k) >= threads * LONG_ENTRIES:
        return _by_threads(q, k, v, scale, threads)
    if bias is not None and bias.shape[-1] > 1:
        # The mask that the tiled kernel wants is then as large as the logits.
        rows = max(1, BLOCK_LOGITS // (heads * group * len(k)))
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    states = []
    for begin in range(0, len(q), rows):
        part = q[begin : begin + rows]
        folded = part.permute(1, 2, 0, 3).reshape(heads, group * len(part), dim)
        mask = None if bias is None else _mask(bias, group, len(part))
        batch = folded.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0)
        o, lse = (x.squeeze(0) for x in flash(*batch, scale, False, mask))
        if bias is not None and bias[..., 0, :].isneginf().any():
            # PyTorch's operator on CPUs says 0 for rows that see no entry.
            most = _mask(bias.amax(-2, keepdim=True), group, len(part)).squeeze(-1).squeeze(0)
            lse = lse.masked_fill(most.isneginf(), float("-inf"))
        o = o.view(heads, group, len(part), dim).permute(2, 0, 1, 3)
        lse = lse.reshape(heads, group, len(part)).permute(2, 0, 1)
        states.append(AttentionState(o, lse.float()))
    return concat(states)


def _by_threads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, threads: int
) -> AttentionState:
    """`dense` of one head. PyTorch gives a head's few rows to one thread, so the entries are cut
    into as many heads as there are threads, whose states are merged."""
    each = len(k) // threads
    keys, values = (x[: each * threads].reshape(threads, each, -1).transpose(0, 1) for x in (k, v))
    found = dense(q.expand(-1, threads, -1, -1), keys, values, None, scale)
    lse = found.lse.logsumexp(1, keepdim=True)
    o = (found.o * (found.lse - lse).exp().unsqueeze(-1)).sum(1, keepdim=True)
    state = AttentionState(o.to(q.dtype), lse)
    left = slice(each * threads, None)
    return merge_states(state, dense(q, k[left], v[left], None, scale)) if len(k[left]) else state


def _mask(bias: torch.Tensor, group: int, rows: int) -> torch.Tensor:
    """[1, heads or 1, group * rows, entries]: `dense`'s bias for rows as it folds them. A view
    where query heads or rows are one."""
    entries, votes = bias.shape[-2:]
    sides = bias.reshape(-1, entries, votes).transpose(1, 2)[:, None, :, None]
    wide = sides.expand(-1, group // votes, votes, rows, entries)
    return wide.reshape(1, -1, group * rows, entries)


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


def concat(states: list[AttentionState]) -> AttentionState:
    if len(states) == 1:
        return states[0]
    return AttentionState(torch.cat([s.o for s in states]), torch.cat([s.lse for s in states]))

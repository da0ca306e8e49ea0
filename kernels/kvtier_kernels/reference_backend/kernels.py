"""The backend `reference`: plain PyTorch, any device, no padding, no copy of long runs.

Its speed on a CPU matters (it serves the engine there), its clarity matters more: the other
backends are tested against it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier_kernels.base import AttentionKernels, AttentionState, RaggedKV, Window
from kvtier_kernels.fp8 import take
from kvtier_kernels.reference_backend.memory import ReferenceMemory
from kvtier_kernels.reference_backend.selection import ReferenceSelection
from kvtier_kernels.reference_backend.slots import RequestSlots, plan_batch, plan_request
from kvtier_kernels.states import empty_state, merge_states

# Queries per block of the banded attention of streaming prefill.
WINDOW_BLOCK_TOKENS = 512
# Logits held at a time where no tiled operator exists: 64 M float32.
BLOCK_LOGITS = 1 << 26

Plan = tuple[RequestSlots, ...]


class ReferenceKernels(AttentionKernels):
    name = "reference"
    selection = ReferenceSelection()
    memory = ReferenceMemory()

    def plan(
        self,
        slots: torch.Tensor,
        indptr: Sequence[int],
        log_votes: torch.Tensor | None = None,
    ) -> Plan:
        return plan_batch(slots, indptr, log_votes)

    def decode(self, q: torch.Tensor, kv: RaggedKV, plan: Plan, scale: float) -> AttentionState:
        states = [_over_entries(q[i : i + 1], kv, request, scale) for i, request in enumerate(plan)]
        return _concat(states)

    def extend(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        q_indptr: Sequence[int],
        kv: RaggedKV,
        plan: Plan,
        scale: float,
        window: Window | None = None,
    ) -> AttentionState:
        states = []
        entries_before = 0
        for i, request in enumerate(plan):
            rows = slice(q_indptr[i], q_indptr[i + 1])
            args = (q[rows], k_new[rows], v_new[rows], kv, request, scale)
            if window is None:
                states.append(_extend_exact(*args))
            else:
                entries = slice(entries_before, entries_before + request.num_entries)
                states.append(_extend_windowed(*args, window, i, entries))
            entries_before += request.num_entries
        return _concat(states)

    def merge_states(self, a: AttentionState, b: AttentionState) -> AttentionState:
        return merge_states(a, b)


def _concat(states: list[AttentionState]) -> AttentionState:
    if len(states) == 1:
        return states[0]
    return AttentionState(torch.cat([s.o for s in states]), torch.cat([s.lse for s in states]))


def _extend_exact(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    kv: RaggedKV,
    request: RequestSlots,
    scale: float,
) -> AttentionState:
    own = _causal(q, k_new, v_new, scale)
    if request.num_entries == 0:
        return own
    return merge_states(_over_entries(q, kv, request, scale), own)


def _over_entries(
    q: torch.Tensor, kv: RaggedKV, request: RequestSlots, scale: float
) -> AttentionState:
    """Unmasked attention of q [rows, heads, group, dim] over the entries of one request."""
    state = None
    for start, stop in request.runs:
        k, v = kv.k[start:stop].to(q.dtype), kv.v[start:stop].to(q.dtype)
        part = _dense(q, k, v, None, scale)
        state = part if state is None else merge_states(state, part)
    if request.scattered is not None:
        k, v = (take(x, 0, request.scattered).to(q.dtype) for x in (kv.k, kv.v))
        bias = None
        if request.voted and kv.log_votes is not None:
            bias = kv.log_votes.index_select(0, request.scattered)
        part = _dense(q, k, v, bias, scale)
        state = part if state is None else merge_states(state, part)
    return empty_state(q) if state is None else state


def _dense(
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
    o, lse = _tiled(folded, k.transpose(0, 1), v.transpose(0, 1), scale, mask=mask)
    return _unfold(o, lse, rows, group)


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
        o, lse = _tiled(folded, k.transpose(0, 1), v.transpose(0, 1), scale, mask=mask)
        states.append(_unfold(o, lse, part.shape[0], group))
    return _concat(states)


def _tiled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [heads, rows, dim] over k, v [heads, entries, dim] -> o, lse; nothing quadratic is held."""
    o, lse = _flash(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), scale, causal, mask)
    return o.squeeze(0), lse.squeeze(0)


def _flash(
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
    """`_flash` for devices without that operator: blocks of entries, merged as they come."""
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


def _unfold(o: torch.Tensor, lse: torch.Tensor, rows: int, group: int) -> AttentionState:
    """[heads, group * rows, ...] back to [rows, heads, group, ...]."""
    heads, _, dim = o.shape
    o = o.view(heads, group, rows, dim).permute(2, 0, 1, 3)
    lse = lse.reshape(heads, group, rows).permute(2, 0, 1)
    return AttentionState(o, lse.float())


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> AttentionState:
    """New tokens over themselves: q [rows, heads, group, dim], k, v [rows, heads, dim]."""
    rows, heads, group, dim = q.shape
    # KV heads as the batch, the GQA group as heads: K and V are broadcast, not repeated.
    wide = (heads, group, rows, dim)
    k = k.transpose(0, 1).unsqueeze(1).expand(wide)
    v = v.transpose(0, 1).unsqueeze(1).expand(wide)
    o, lse = _flash(q.permute(1, 2, 0, 3), k, v, scale, True, None)
    return AttentionState(o.permute(2, 0, 1, 3), lse.permute(2, 0, 1).float())


def _extend_windowed(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    kv: RaggedKV,
    request: RequestSlots,
    scale: float,
    window: Window,
    index: int,
    entries: slice,
) -> AttentionState:
    """Streaming prefill of one request (see `Window`), in bands of WINDOW_BLOCK_TOKENS.

    keys:   [ settled entries ][ sink ][ ...hidden... ][ recent ][ block, causal ]
    """
    q_start, positions = window.q_start[index], window.positions[entries]
    settled = window.settled[entries] | (positions < window.sink_tokens)
    near = ~settled & (positions > q_start - window.recent_tokens)
    slots = request.all_slots
    # Everything a band can see of this turn, in order of position.
    near_k, near_v = (take(x, 0, slots[near]).to(q.dtype) for x in (kv.k, kv.v))
    k, v = torch.cat([near_k, k_new]), torch.cat([near_v, v_new])
    new_positions = torch.arange(q_start, q_start + q.shape[0], device=q.device)
    key_positions = torch.cat([positions[near], new_positions])
    bands = []
    for begin in range(0, q.shape[0], WINDOW_BLOCK_TOKENS):
        end = min(begin + WINDOW_BLOCK_TOKENS, q.shape[0])
        bands.append(
            _band(q[begin:end], new_positions[begin:end], k, v, key_positions, scale, window)
        )
    own = _concat(bands)
    if not bool(settled.any()):
        return own
    settled_slots = plan_request(slots[settled], kv.log_votes)
    return merge_states(_over_entries(q, kv, settled_slots, scale), own)


def _band(
    q: torch.Tensor,
    q_positions: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_positions: torch.Tensor,
    scale: float,
    window: Window,
) -> AttentionState:
    """One block of consecutive queries over the keys its window and sinks reach."""
    first, last = int(q_positions[0]), int(q_positions[-1])
    sink = key_positions < window.sink_tokens
    reach = (key_positions > first - window.recent_tokens) & (key_positions <= last)
    keys = torch.nonzero(reach | (sink & (key_positions <= last))).flatten()
    t = key_positions[keys].unsqueeze(0)
    p = q_positions.unsqueeze(1)
    visible = (t <= p) & ((t < window.sink_tokens) | (t > p - window.recent_tokens))
    rows, heads, group, dim = q.shape
    hidden = torch.zeros(visible.shape, dtype=q.dtype, device=q.device)
    hidden.masked_fill_(~visible, float("-inf"))
    folded = q.permute(1, 2, 0, 3).reshape(heads, group * rows, dim)
    mask = hidden.repeat(group, 1).expand(1, 1, -1, -1)
    o, lse = _tiled(folded, k[keys].transpose(0, 1), v[keys].transpose(0, 1), scale, mask=mask)
    return _unfold(o, lse, rows, group)

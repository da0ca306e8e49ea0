"""The backend `reference`: plain PyTorch, any device, no padding, no copy of long runs.

Its speed on a CPU matters (it serves the engine there), its clarity matters more: the other
backends are tested against it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier_kernels.base import AttentionKernels, AttentionState, RaggedKV, Window
from kvtier_kernels.fp8 import take
from kvtier_kernels.reference_backend.lists import ReferenceLists
from kvtier_kernels.reference_backend.memory import ReferenceMemory
from kvtier_kernels.reference_backend.products import concat, flash, over_entries, tiled, unfold
from kvtier_kernels.reference_backend.selection import ReferenceSelection
from kvtier_kernels.reference_backend.slots import RequestSlots, plan_batch, plan_request
from kvtier_kernels.states import merge_states

# Queries per block of the banded attention of streaming prefill.
WINDOW_BLOCK_TOKENS = 512

Plan = tuple[RequestSlots, ...]


class ReferenceKernels(AttentionKernels):
    name = "reference"
    selection = ReferenceSelection()
    memory = ReferenceMemory()
    lists = ReferenceLists()

    def plan(
        self,
        slots: torch.Tensor,
        indptr: Sequence[int],
        log_votes: torch.Tensor | None = None,
    ) -> Plan:
        return plan_batch(slots, indptr, log_votes)

    def decode(self, q: torch.Tensor, kv: RaggedKV, plan: Plan, scale: float) -> AttentionState:
        states = [over_entries(q[i : i + 1], kv, request, scale) for i, request in enumerate(plan)]
        return concat(states)

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
        return concat(states)

    def merge_states(self, a: AttentionState, b: AttentionState) -> AttentionState:
        return merge_states(a, b)


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
    return merge_states(over_entries(q, kv, request, scale), own)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> AttentionState:
    """New tokens over themselves: q [rows, heads, group, dim], k, v [rows, heads, dim]."""
    rows, heads, group, dim = q.shape
    # KV heads as the batch, the GQA group as heads: K and V are broadcast, not repeated.
    wide = (heads, group, rows, dim)
    k = k.transpose(0, 1).unsqueeze(1).expand(wide)
    v = v.transpose(0, 1).unsqueeze(1).expand(wide)
    o, lse = flash(q.permute(1, 2, 0, 3), k, v, scale, True, None)
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
    own = concat(bands)
    if not bool(settled.any()):
        return own
    settled_slots = plan_request(slots[settled], kv.log_votes)
    return merge_states(over_entries(q, kv, settled_slots, scale), own)


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
    o, lse = tiled(folded, k[keys].transpose(0, 1), v[keys].transpose(0, 1), scale, mask=mask)
    return unfold(o, lse, rows, group)

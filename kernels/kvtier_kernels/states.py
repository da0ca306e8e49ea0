"""The algebra of attention states: a commutative monoid under `merge_states`."""

from __future__ import annotations

import torch

from kvtier_kernels.base import AttentionState


def empty_state(like: torch.Tensor) -> AttentionState:
    """The identity of `merge_states`: zero output, lse = -inf.

    like: [tokens, heads, group, dim], whose shape, dtype and device the state takes.
    """
    lse = torch.full(like.shape[:-1], float("-inf"), dtype=torch.float32, device=like.device)
    return AttentionState(torch.zeros_like(like), lse)


def merge_states(a: AttentionState, b: AttentionState) -> AttentionState:
    """The state over the union of two disjoint blocks of KV.

    ``l = logaddexp(la, lb); o = e^(la-l) oa + e^(lb-l) ob``. Associative and commutative up
    to rounding; two empty blocks merge to an empty one.
    """
    lse = torch.logaddexp(a.lse, b.lse)
    # Both empty: lse is -inf and the differences are NaN; the output stays zero.
    shift = torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)
    weight_a = torch.exp(a.lse - shift).unsqueeze(-1)
    weight_b = torch.exp(b.lse - shift).unsqueeze(-1)
    o = weight_a * a.o.float() + weight_b * b.o.float()
    return AttentionState(o.to(a.o.dtype), lse)

"""Exact attention over long contexts without a T×T matrix: attention states and their merge.

An attention state is `(out, lse)`: the normalised output of queries over one block of keys and the
log-sum-exp of their logits.  Two blocks merge exactly:

    lse = logaddexp(lse1, lse2)      out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


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

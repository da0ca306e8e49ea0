"""Attention states and their algebra: a commutative monoid under `merge_states`."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionState(NamedTuple):
    """Normalised output and log-sum-exp of queries over one block of KV.

    o:   [tokens, heads, group, dim] in the query's dtype.
    lse: [tokens, heads, group] float32, natural log; -inf where the block is empty.
    """

    o: torch.Tensor
    lse: torch.Tensor


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
    # e^(la-l) = sigmoid(la-lb). Where both are empty the difference is NaN: any share will do, as
    # both outputs are zero.
    share = torch.sigmoid(torch.nan_to_num(a.lse - b.lse)).unsqueeze(-1)
    o = torch.lerp(b.o.to(share.dtype), a.o.to(share.dtype), share)
    return AttentionState(o.to(a.o.dtype), torch.logaddexp(a.lse, b.lse))


def with_sinks(state: AttentionState, sinks: torch.Tensor) -> AttentionState:
    """The state over one entry more, whose value is zero and whose logit does not depend on the
    query: what heads give to nothing (an attention sink, as gpt-oss has it).

    sinks: [heads, group], the logits, natural log like the LSE.
    """
    share = torch.sigmoid(state.lse - sinks).unsqueeze(-1)
    return AttentionState((state.o * share).to(state.o.dtype), torch.logaddexp(state.lse, sinks))

"""Drafted tokens, verified in one pass: each sees its request's prefix and its own branch.

    prefix entries     root    drafts
    . . . . . . .       a ──── b ──── c         a: the newest token, whose KV is not there yet
                          └─── d                a b c, a d: what may follow, in branches

The prefix is the same for all drafts of a request, so to the kernels they are so many more query
heads of one decoding query. What drafts see of each other is small, and computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvtier_kernels import AttentionState

# Query heads that a decoding kernel is given at once: one program of Triton's holds them all.
MOST_ROWS = 128


def tree_masks(forward_batch: Any) -> torch.Tensor:
    """Return which drafts each draft sees: bool `[requests, drafts, drafts]`.

    SGLang's mask has for each request `[drafts, prefix + drafts]`, one after another, or only the
    last square of it.
    """
    drafts, mask = forward_batch.spec_info, forward_batch.spec_info.custom_mask
    count, lengths = drafts.draft_token_num, forward_batch.seq_lens
    if mask.numel() == lengths.numel() * count * count:
        return mask.view(-1, count, count)
    widths = lengths + count
    begins = count * (widths.cumsum(0) - widths) + lengths
    step = torch.arange(count, device=mask.device)
    at = begins[:, None, None] + step[:, None] * widths[:, None, None] + step
    return mask[at]


def fold(x: torch.Tensor, drafts: int) -> torch.Tensor:
    """Queries `[requests * drafts, heads, group, dim]` as those of one token of each request:
    `[requests, heads, drafts * group, dim]`."""
    _, heads, group, dim = x.shape
    by_request = x.view(-1, drafts, heads, group, dim).transpose(1, 2)
    return by_request.reshape(-1, heads, drafts * group, dim)


def unfold(x: torch.Tensor, drafts: int) -> torch.Tensor:
    """The inverse of `fold`, contiguous."""
    requests, heads, rows, dim = x.shape
    by_request = x.view(requests, heads, drafts, rows // drafts, dim).transpose(1, 2)
    return by_request.contiguous().view(requests * drafts, heads, rows // drafts, dim)


def over_prefixes(
    decode: Callable[[torch.Tensor], AttentionState], q: torch.Tensor
) -> AttentionState:
    """Folded queries `[requests, heads, rows, dim]` over what `decode` reads, as many rows a time
    as one program of a GPU can hold."""
    if q.shape[2] <= MOST_ROWS:
        return decode(q)
    parts = [decode(rows.contiguous()) for rows in torch.split(q, MOST_ROWS, dim=2)]
    return AttentionState(*(torch.cat(sides, dim=2) for sides in zip(*parts, strict=True)))


def over_branches(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: torch.Tensor, scale: float
) -> AttentionState:
    """Drafts over their own branches.

    q: folded, `[requests, heads, drafts * group, dim]`; k, v: `[requests * drafts, heads, dim]`;
    masks: as of `tree_masks`. The state is folded, too.
    """
    requests, heads, rows, dim = q.shape
    drafts = masks.shape[-1]
    keys, values = (x.view(requests, drafts, heads, dim).transpose(1, 2).float() for x in (k, v))
    logits = (q.float() @ keys.transpose(2, 3)) * scale
    seen = masks.repeat_interleave(rows // drafts, dim=1).unsqueeze(1)
    logits = logits.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    o = torch.exp(logits - lse.unsqueeze(-1)) @ values
    return AttentionState(o.to(q.dtype), lse)

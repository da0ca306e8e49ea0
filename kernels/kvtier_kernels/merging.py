"""KV entries merged into others instead of dropped, as KeepKV does: all merges at once.

A bin is a kept entry and all dropped ones assigned to it. With votes p_i and logits a_i of a query,

    w_i = p_i e^(a_i)    W = Σ w_i    λ_i = w_i / W      (per bin)

the merged entry is

    v = Σ λ_i v_i    k = Σ λ_i k_i    ln p = ln W - a of k

whose vote × score is W again. So numerator and denominator of attention stay what they were for the
query that gave the logits: Theorem 3, for any number of entries (conditions 16 and 17). The paper
adds votes up instead, and scales the key to fit (equations 8 to 11). Here the vote is real: one
query and p_i = 1 give the perplexity of λ, the number of entries that the query tells apart. The
key is the gradient of ln W in q, so the error at another query is of second order; and merging in
any order gives the same entry.

GQA: all query heads of a group share k and v. Each has a log-vote of its own and so keeps its W; k
and v are exact for a group of one, and otherwise weighted means over the group, see `merge_bins`.

Layout: heads first, `[heads, tokens, dim]`. Any float dtype and device, float32 inside, nothing is
ever context × context. Stateless, and on CUDA nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kvtier_kernels.bins import UNMERGED, Bins
from kvtier_kernels.blocks import blocks, long_product
from kvtier_kernels.registry import selection_kernels


class Entries(NamedTuple):
    """KV entries of some KV heads.

    k, v:      `[heads, entries, dim]`
    log_votes: `[heads, group, entries]` float32, added to the logits of each query head; or
               `[heads, 1, entries]` where a group votes as one. Finite, except that an entry
               which stands for nothing has -inf.
    """

    k: torch.Tensor
    v: torch.Tensor
    log_votes: torch.Tensor


class Assignment(NamedTuple):
    """A home for each entry.

    kept:   `[heads, count]` int64, distinct indices of entries
    target: `[heads, tokens]` int64, a position in `kept` (a kept entry's own) or UNMERGED
    """

    kept: torch.Tensor
    target: torch.Tensor


def exact_entries(k: torch.Tensor, v: torch.Tensor) -> Entries:
    """Tokens as they were computed: k, v `[heads, tokens, dim]`, one vote each."""
    return Entries(k, v, torch.zeros(k.shape[0], 1, k.shape[1], device=k.device))


def assign(keys: torch.Tensor, kept: torch.Tensor, floor: float = 0.8) -> Assignment:
    """Send each dropped entry to the kept one whose key is most like its own (cosine).

    keys:  `[heads, tokens, dim]`, as attended to (rotated)
    kept:  `[heads, count]` int64, distinct, count >= 1
    floor: an entry is unmerged unless more similar than this; 1 merges nothing
    Keys that are not numbers are like no other.
    """
    heads, tokens, _ = keys.shape
    count = kept.shape[1]
    is_kept = torch.zeros(heads, tokens, dtype=torch.bool, device=keys.device)
    is_kept.scatter_(1, kept, True)
    homes = _at(keys, kept)
    lengths = torch.linalg.vector_norm(homes, dim=-1, dtype=torch.float32)
    order = torch.arange(count, device=keys.device).expand(heads, count)
    target = torch.full((heads, tokens), UNMERGED, device=keys.device).scatter_(1, kept, order)
    dropped = _others(is_kept, tokens - count)
    selection_kernels(keys.device).find_homes(keys, dropped, homes, lengths, floor, target)
    return Assignment(kept, target)


def merge_bins(
    entries: Entries,
    logits: torch.Tensor,
    assignment: Assignment,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
) -> Entries:
    """Merge every bin.

    logits:    `[heads, group, tokens]` of the entries, without votes
    logits_of: the same logits of any keys `[heads, n, dim]`, for votes of the key as it is stored
    Returns `[heads, count, dim]` in the entries' dtype, log-votes `[heads, group, count]`. An entry
    that took in no other stays bit for bit what it was.

    What a group shares: an entry whose log-mass is off by ε and whose value by Δ moves the output
    of query head g by about A_g·(ε, Δ), where A_g is the attention that g pays to the bin. The sum
    of squares is least for the mean of the heads' own λ with weights A_g². The weights here are
    A_g: a little worse for the queries that gave the logits, and better for later ones
    (tests/retention/test_keepkv.py draws such queries).
    """
    kernels = selection_kernels(assignment.target.device)
    bins = kernels.bins(assignment.target, assignment.kept.shape[1])
    log_shares, mass = bins.log_softmax(entries.log_votes.float() + logits.float())
    log_attention = mass - torch.logsumexp(mass, dim=-1, keepdim=True)
    voices = torch.softmax(log_attention, dim=1)
    weights = (bins.spread(voices) * log_shares.exp()).sum(1)
    k = bins.mix(weights, entries.k).to(entries.k.dtype)
    v = bins.mix(weights, entries.v).to(entries.v.dtype)
    log_votes = mass[..., : bins.count] - logits_of(k)
    return _keep_singles(Entries(k, v, log_votes), entries, assignment.kept, bins)


def compensate(entries: Entries, assignment: Assignment) -> Entries:
    """Fold the unmerged entries into one, as RazorAttention folds what a head drops.

    Returns one entry per head, k and v the vote-weighted means in the entries' dtype, its votes the
    sum of theirs for every row of log-votes; zeros with -inf where there is none to fold. Query
    heads that vote apart share the mean of their weights.
    """
    folded = (assignment.target == UNMERGED).unsqueeze(1)
    votes = entries.log_votes.float().masked_fill(~folded, float("-inf"))
    total = torch.logsumexp(votes, dim=-1, keepdim=True)
    weights = torch.exp(votes - total.nan_to_num(neginf=0.0)).mean(1, keepdim=True)
    k, v = (_weighted_mean(weights, side) for side in (entries.k, entries.v))
    return Entries(k, v, total)


def _others(is_kept: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` entries of every head that are not kept, in order: int64
    `[heads, count]`."""
    heads, tokens = is_kept.shape
    index = torch.arange(tokens, device=is_kept.device).expand(heads, -1)
    place = (~is_kept).cumsum(1) - 1
    # Kept entries go to a place behind the last.
    place = place.masked_fill_(is_kept, count).clamp_(max=count)
    return index.new_empty(heads, count + 1).scatter_(1, place, index)[:, :count]


def _keep_singles(merged: Entries, entries: Entries, kept: torch.Tensor, bins: Bins) -> Entries:
    """Undo the rounding of entries that took in no other."""
    single = (bins.sizes() == 1).unsqueeze(-1)
    rows = kept.unsqueeze(1).expand(-1, entries.log_votes.shape[1], -1)
    votes = entries.log_votes.gather(2, rows)
    return Entries(
        torch.where(single, _at(entries.k, kept), merged.k),
        torch.where(single, _at(entries.v, kept), merged.v),
        torch.where(single.transpose(1, 2), votes, merged.log_votes),
    )


def _at(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x `[heads, tokens, dim]` at index `[heads, n]`."""
    return torch.take_along_dim(x, index.unsqueeze(-1), 1)


def _weighted_mean(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """weights `[heads, 1, tokens]`, x `[heads, tokens, dim]` -> `[heads, 1, dim]` in x's dtype."""
    heads, tokens, dim = x.shape
    out = torch.zeros(heads, 1, dim, dtype=torch.float64, device=x.device)
    for part in blocks(tokens, heads * dim):
        out += long_product(weights[..., part], x[:, part].float())
    return out.to(x.dtype)

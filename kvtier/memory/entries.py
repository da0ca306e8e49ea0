"""Queries grouped into entries: a key, and the attention state that stands for its members.

    q of a token, all heads ──PCA──> R numbers ─┐
    how far behind the prefix ──> 4 numbers ────┴──> key of length 1 ──k-means──> M entries

The state of an entry is what its members would find together, as an average (Attention-State
Memory): the merge of their states, less ln n. With as many entries as queries, each has its own.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvtier.memory.collecting import LayerQueries
from kvtier_kernels.memory.base import lookup_keys, project

# Rounds of k-means; more change nothing that can be measured.
ROUNDS = 20
# Queries that the directions are found from, evenly taken of all.
PCA_QUERIES = 8192


class Entries(NamedTuple):
    """M entries of one layer.

    projection: float32 `[R, kv_heads, group, dim]`
    keys:       float32 `[M, R + PLACE_WIDTH]`, rows of length 1
    o, lse:     float32 `[M, kv_heads, group, dim]` and `[M, kv_heads, group]`
    members:    int64 `[M]`, queries that each stands for
    """

    projection: Tensor
    keys: Tensor
    o: Tensor
    lse: Tensor
    members: Tensor


def make_entries(
    queries: LayerQueries,
    behind: Tensor,
    *,
    entries: int,
    width: int,
    place_weight: float,
    seed: int = 0,
    least_members: int = 1,
) -> Entries:
    """Make at most so many entries of a layer's queries.

    width:         numbers that a query is projected to, R
    place_weight:  how much the place counts beside the direction, 0 for not at all
    least_members: entries that stand for fewer queries are left out

    There are fewer entries where there are fewer queries, or groups without a member.
    """
    projection = directions(queries.q, width)
    keys = query_keys(queries.q, behind, projection, place_weight)
    group = groups(keys, entries, seed)
    members = torch.bincount(group, minlength=int(group.max()) + 1)
    o, lse = averaged(queries.o, queries.lse, group, len(members))
    centre = torch.zeros(len(members), keys.shape[1]).index_add_(0, group, keys)
    kept = members >= max(1, least_members)
    centres = torch.nn.functional.normalize(centre, dim=-1)
    return Entries(projection, centres[kept], o[kept], lse[kept], members[kept])


def directions(q: Tensor, width: int) -> Tensor:
    """The `width` directions that queries `[T, kv_heads, group, dim]` are longest in, float32
    `[R, kv_heads, group, dim]`; R is less where there are fewer queries or numbers."""
    flat = q.flatten(1)
    step = max(1, len(flat) // PCA_QUERIES)
    some = torch.nn.functional.normalize(flat[::step].float(), dim=-1)
    _, _, found = torch.linalg.svd(some, full_matrices=False)
    longest: Tensor = found[:width].view(-1, *q.shape[1:]).contiguous()
    return longest


def query_keys(q: Tensor, behind: Tensor, projection: Tensor, place_weight: float) -> Tensor:
    """The keys of queries, float32 `[T, R + PLACE_WIDTH]`."""
    return lookup_keys(project(q, projection[None])[:, 0], behind, place_weight)


def groups(keys: Tensor, count: int, seed: int) -> Tensor:
    """int64 `[T]`, which of at most `count` groups each of the keys `[T, width]` is in, numbered
    without gaps: k-means over rows of length 1."""
    if len(keys) <= count:
        return torch.arange(len(keys))
    # SciPy comes with `kvtier[calibrate]`.
    from scipy.cluster.vq import kmeans2

    with warnings.catch_warnings():
        # An empty group is left out below.
        warnings.simplefilter("ignore", UserWarning)
        _, found = kmeans2(
            keys.numpy().astype(np.float32), count, iter=ROUNDS, minit="points", seed=seed
        )
    return torch.from_numpy(np.unique(found, return_inverse=True)[1])


def averaged(o: Tensor, lse: Tensor, group: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The merge of the states of each group's members, less ln n.

    o `[T, …, dim]`, lse `[T, …]`, group int64 `[T]` in 0 … count - 1, each with a member.
    """
    index = group.view(-1, *[1] * (lse.ndim - 1)).expand_as(lse)
    top = torch.full((count, *lse.shape[1:]), -torch.inf).scatter_reduce_(0, index, lse, "amax")
    share = torch.exp(lse - top.gather(0, index))
    total = torch.zeros_like(top).index_add_(0, group, share)
    out = torch.zeros(count, *o.shape[1:]).index_add_(0, group, o * share.unsqueeze(-1))
    members = torch.bincount(group, minlength=count).view(-1, *[1] * (lse.ndim - 1))
    return out / total.unsqueeze(-1), top + total.log() - members.log()

"""Build a memory of a prefix from traces: `kvtier memory build`.

    traces ──┬── most of them ──> entries, kept KV
             └── the others ────> how near an entry must be, which heads entries serve badly

The others are of other groups (traces.split). What the memory costs is measured on requests that
are neither (measuring.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtier.errors import UsageError
from kvtier.heads.progress import Progress, no_progress
from kvtier.memory.collecting import Collected, LayerQueries, collect, prefix_kv
from kvtier.memory.entries import Entries, make_entries, query_keys
from kvtier.memory.prefixes import LayerKV
from kvtier.memory.recipe import Recipe
from kvtier.memory.traces import Trace, split
from kvtier_kernels.memory.base import PLACE_WIDTH, MemoryLayer

# Of the traces, for what entries are judged by.
JUDGING_SHARE = 0.25
# Of the judging traces, how many may be read with the exact prefix after all.
FEW = 0.02
# A cosine that none reaches.
NEVER = 2.0


@dataclass(frozen=True)
class Built:
    """A memory's layers, N = 1 each, and what they were made of.

    members:     int64 `[M]` per layer, queries that each entry stands for
    head_errors: float32 `[layers, kv_heads]`, what entries lose of each head's answers on the
                 judging traces, as a share of all; None without entries
    requeue_above: share of a prompt's lookups that fall back which few of the judging traces
                 reach (FEW)
    """

    layers: tuple[MemoryLayer, ...]
    members: tuple[Tensor, ...]
    head_errors: Tensor | None
    requeue_above: float = 1.0


def build(
    model: Any,
    prefix_ids: Sequence[int],
    traces: Sequence[Trace],
    recipe: Recipe,
    *,
    seed: int = 0,
    chunk_tokens: int | None = None,
    progress: Progress = no_progress,
) -> Built:
    """A memory of the prefix. chunk_tokens: as in `prefix_kv`. Raises UsageError for traces that do
    not differ."""
    kv = prefix_kv(model, prefix_ids, chunk_tokens=chunk_tokens)
    making, judging = split(traces, JUDGING_SHARE, seed)
    made = collect(model, kv, making, progress)
    judged = collect(model, kv, judging, progress, with_own=True) if recipe.entries else None
    return assemble(kv, made, judged, recipe, seed)


def assemble(
    kv: Sequence[LayerKV], made: Collected, judged: Collected | None, recipe: Recipe, seed: int = 0
) -> Built:
    """A memory of what was collected. judged: of the judging traces; None without entries."""
    if judged is None or not recipe.entries:
        layers = [
            _layer(kv[at], queries, None, NEVER, _no_heads(queries), recipe)
            for at, queries in enumerate(made.layers)
        ]
        return Built(tuple(layers), (), None)
    entries, nearness, errors, fell = [], [], [], []
    for queries, others in zip(made.layers, judged.layers, strict=True):
        mine = make_entries(
            queries, made.behind, entries=recipe.entries, width=recipe.key_width,
            place_weight=recipe.place_weight, seed=seed, least_members=recipe.least_members,
        )  # fmt: skip
        if not len(mine.keys):
            raise UsageError(
                "--no-store-queries", "some entry with as many queries", recipe.least_members
            )
        keys = query_keys(others.q, judged.behind, mine.projection, recipe.place_weight)
        cosine, nearest = (keys @ mine.keys.T).max(-1)
        entries.append(mine)
        nearness.append(float(torch.quantile(cosine, recipe.gate)) if recipe.gate else -1.0)
        fell.append(cosine < nearness[-1])
        errors.append(_errors(others, mine, nearest))
    found = torch.stack(errors)
    looks_up = ~worst_heads(found, recipe.exact_heads)
    layers = [
        _layer(kv[at], queries, entries[at], nearness[at], looks_up[at], recipe)
        for at, queries in enumerate(made.layers)
    ]
    return Built(
        tuple(layers),
        tuple(one.members for one in entries),
        found / found.sum(),
        _reached_by_few(torch.stack(fell)[looks_up.any(-1)], judged.trace),
    )


def _reached_by_few(fell: Tensor, trace: Tensor) -> float:
    """The share of fallen lookups that few traces are above. fell: bool `[layers, tokens]`."""
    if not len(fell):
        return 1.0
    by_token = fell.float().mean(0)
    sums = torch.zeros(int(trace.max()) + 1).index_add_(0, trace, by_token)
    return float(torch.quantile(sums / torch.bincount(trace), 1 - FEW))


def worst_heads(errors: Tensor, share: float) -> Tensor:
    """bool `[layers, kv_heads]`: the heads with the largest errors, of all layers."""
    worst = torch.zeros(errors.numel(), dtype=torch.bool)
    worst[errors.flatten().topk(round(share * errors.numel())).indices] = True
    return worst.view(errors.shape)


def most_drawn(mass: Tensor, tokens: int) -> Tensor:
    """Which tokens of the prefix drew the most attention, int64 ascending; mass `[tokens]`."""
    return mass.topk(min(tokens, len(mass))).indices.sort().values


def _no_heads(queries: LayerQueries) -> Tensor:
    return torch.zeros(queries.q.shape[1], dtype=torch.bool)


def _errors(queries: LayerQueries, entries: Entries, nearest: Tensor) -> Tensor:
    """Float32 `[kv_heads]`: the squared error that entries make of each head's outputs, which are
    of the prefix and of the request's own tokens together."""
    own_o, own_lse = queries.own_o, queries.own_lse
    assert own_o is not None, "collected without the requests' own states"
    assert own_lse is not None, "collected without the requests' own states"

    def output(o: Tensor, lse: Tensor) -> Tensor:
        return torch.lerp(own_o, o, torch.sigmoid(lse - own_lse).unsqueeze(-1))

    found = output(entries.o[nearest], entries.lse[nearest])
    difference = found - output(queries.o, queries.lse)
    return difference.square().sum(-1).sum(-1).mean(0)


def _layer(
    kv: LayerKV, queries: LayerQueries, entries: Entries | None, nearness: float, looks_up: Tensor,
    recipe: Recipe,
) -> MemoryLayer:  # fmt: skip
    """One layer, N = 1, in float32 on the CPU."""
    k, v = (x.float().cpu() for x in kv)
    kv_heads, group, dim = queries.q.shape[1:]
    prefix_tokens = k.shape[1]
    exact = prefix_tokens if recipe.exact_tokens is None else recipe.exact_tokens
    kept = []
    for head in range(kv_heads):
        is_exact = entries is not None and not looks_up[head]
        tokens = max(exact, recipe.kept_tokens) if is_exact else recipe.kept_tokens
        kept.append(most_drawn(queries.mass[head], tokens))
    counts = torch.tensor([len(mine) for mine in kept])
    if entries is None:
        empty = torch.zeros(0, kv_heads, group, dim)
        projection, keys = torch.zeros(1, kv_heads, group, dim), torch.zeros(0, 1 + PLACE_WIDTH)
        o, lse = empty, empty[..., 0]
    else:
        projection, keys, o, lse = entries[:4]
    return MemoryLayer(
        projection=projection[None],
        keys=keys,
        key_indptr=torch.tensor([0, len(keys)], dtype=torch.int32),
        place_weight=torch.tensor([recipe.place_weight]),
        nearness=torch.tensor([nearness]),
        prefix_tokens=torch.tensor([prefix_tokens], dtype=torch.int32),
        o=o,
        lse=lse,
        looks_up=looks_up[None],
        kept_k=torch.cat([k[head, mine] for head, mine in enumerate(kept)]),
        kept_v=torch.cat([v[head, mine] for head, mine in enumerate(kept)]),
        kept_indptr=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
    )


__all__ = ["Built", "assemble", "build", "most_drawn", "worst_heads"]

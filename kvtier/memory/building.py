"""A memory of a prefix, from what was collected of traces.

    traces ──┬── all ──────────> kept KV: what any of their queries attends to most
             ├── most of them ─> entries
             └── the others ───> how near an entry must be, which heads states serve best

The others are of other groups (traces.split). What the memory costs is measured on requests that
are none of these (making.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvtier.errors import UsageError
from kvtier.heads.progress import Progress, no_progress
from kvtier.memory.collecting import Collected, LayerQueries, collect
from kvtier.memory.entries import Entries, make_entries, query_keys
from kvtier.memory.prefixes import LayerKV, MemoryPrefix, logits_behind
from kvtier.memory.recipe import Recipe
from kvtier.memory.traces import Trace
from kvtier.retention.head_budgets import best_of_all
from kvtier_kernels.memory.base import PLACE_WIDTH, MemoryLayer

# The share of the traces that entries are judged by.
JUDGING_SHARE = 0.25
# The share of the judging traces that may be read with the exact prefix after all.
FEW = 0.02
# A cosine that none reaches.
NEVER = 2.0
# Layers whose entries tell which requests are like the traces, where no layer has states.
GATE_LAYERS = 4
# Tokens of the prefix that each head keeps in any case: without any it would know of none.
LEAST_KEPT = 4


@dataclass(frozen=True)
class Built:
    """A memory's layers, N = 1 each, and what they were made of.

    members:     int64 `[M]` per layer, queries that each entry stands for
    head_errors: float32 `[layers, kv_heads]`, what states lose of each head's answers on the
                 judging traces, as a share of all; None without states
    requeue_above: share of a prompt's lookups that fall back above which a request is read with the
                 exact prefix; see `with_requeueing`
    """

    layers: tuple[MemoryLayer, ...]
    members: tuple[Tensor, ...]
    head_errors: Tensor | None
    requeue_above: float = 1.0


class _Judged(NamedTuple):
    """A layer's entries, beside the judging traces. nearest: int64 `[tokens]`, their entries;
    nearness: the cosine that an entry answers at."""

    entries: Entries
    nearest: Tensor
    nearness: float


def collected(
    model: Any,
    kv: Sequence[LayerKV],
    making: Sequence[Trace],
    judging: Sequence[Trace],
    recipe: Recipe,
    progress: Progress = no_progress,
) -> tuple[Collected, Collected]:
    """Return what a memory by the recipe needs of the traces that make it, and of those that judge
    it."""
    layers, states = _layers_with_entries(len(kv), recipe), recipe.state_heads > 0
    made = collect(model, kv, making, progress, layers=layers, with_states=states)
    judged = collect(
        model, kv, judging, progress, layers=layers, with_states=states, with_own=states
    )
    return made, judged


def assemble(
    kv: Sequence[LayerKV], made: Collected, judged: Collected, recipe: Recipe, seed: int = 0
) -> Built:
    """A memory of what was collected for the recipe, or for one that needs more. No request is
    read with the exact prefix; see `with_requeueing`."""
    drawn = max_attention_of(made, judged)
    kept = top_attended(drawn, round(recipe.kept_share * drawn[0].numel() * len(drawn)))
    found = {
        at: _judge(made, judged, at, recipe, seed) for at in _layers_with_entries(len(kv), recipe)
    }
    looks_up = torch.zeros(len(kv), drawn[0].shape[0], dtype=torch.bool)
    errors = None
    if recipe.state_heads:
        errors = torch.stack(
            [_errors(judged.layers[at], one.entries, one.nearest) for at, one in found.items()]
        )
        looks_up = best_of_all(-errors, max(1, round(recipe.state_heads * errors.numel())))
        found = {at: one for at, one in found.items() if looks_up[at].any()}
        errors = errors / errors.sum()
    layers = []
    for at, queries in enumerate(made.layers):
        found_here = found[at].entries if at in found else _no_entries(queries)
        nearness = found[at].nearness if at in found else NEVER
        layers.append(_layer(kv[at], kept[at], found_here, nearness, looks_up[at], recipe))
    members = tuple(one.entries.members for one in found.values())
    return Built(tuple(layers), members, errors)


def with_requeueing(model: Any, built: Built, judging: Sequence[Trace]) -> Built:
    """The memory with a limit that few of the judging traces' prompts are above, read behind it as
    requests will be. Their queries are not quite those that they have behind the exact prefix."""
    shares = []
    length = int(built.layers[0].prefix_tokens)
    for trace in judging:
        memory = MemoryPrefix(built.layers)
        logits_behind(model, memory, length, trace.prompt_ids)
        shares.append(memory.fell_back(len(trace.prompt_ids)))
    few = float(torch.quantile(torch.tensor(shares), 1 - FEW))
    return replace(built, requeue_above=few)


def _layers_with_entries(layers: int, recipe: Recipe) -> Sequence[int]:
    """Return the layers that want entries: all for states, a few for a gate alone. The first layer
    of a deep model is not among those few: its queries are of single tokens, and every new word
    would be too far."""
    step = -(-layers // GATE_LAYERS)
    return range(layers) if recipe.state_heads else range(step // 4, layers, step)


def _judge(made: Collected, judged: Collected, at: int, recipe: Recipe, seed: int) -> _Judged:
    """One layer's entries. Raises UsageError where none stands for enough queries."""
    others = judged.layers[at]
    mine = make_entries(
        made.layers[at], made.behind, entries=recipe.entries, width=recipe.key_width,
        place_weight=recipe.place_weight, seed=seed, least_members=recipe.least_members,
    )  # fmt: skip
    if not len(mine.keys):
        raise UsageError(
            "--no-store-queries", "some entry with as many queries", recipe.least_members
        )
    keys = query_keys(others.q, judged.behind, mine.projection, recipe.place_weight)
    cosine, nearest = (keys @ mine.keys.T).max(-1)
    nearness = float(torch.quantile(cosine, recipe.gate)) if recipe.gate else -1.0
    return _Judged(mine, nearest, nearness)


def max_attention_of(*collected: Collected) -> list[Tensor]:
    """Return per layer the most that any query of these drew: see LayerQueries."""
    layers = zip(*(one.layers for one in collected), strict=True)
    return [torch.stack([layer.drawn for layer in alike]).amax(0) for alike in layers]


def top_attended(drawn: Sequence[Tensor], entries: int) -> list[list[Tensor]]:
    """Return the tokens of the prefix that each layer's heads keep, int64 ascending.

    drawn: per layer `[kv_heads, tokens]`, more for what is wanted more; entries: to be kept in all.
    Heads compete: one that attends to a few tokens leaves room to one that attends to many
    (AdaKV). Each keeps LEAST_KEPT in any case.
    """
    worth = torch.stack(list(drawn))
    least = worth.topk(min(LEAST_KEPT, worth.shape[-1]), dim=-1).indices
    worth = worth.scatter(-1, least, torch.inf)
    kept = best_of_all(worth, min(max(entries, least.numel()), worth.numel()))
    return [[head.nonzero().flatten() for head in layer] for layer in kept]


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


def _no_entries(queries: LayerQueries) -> Entries:
    heads, group, dim = queries.q.shape[1:]
    empty = torch.zeros(0, heads, group, dim)
    return Entries(
        projection=torch.zeros(1, heads, group, dim),
        keys=torch.zeros(0, 1 + PLACE_WIDTH),
        o=empty,
        lse=empty[..., 0],
        members=torch.zeros(0, dtype=torch.int64),
    )


def _layer(
    kv: LayerKV,
    kept: Sequence[Tensor],
    entries: Entries,
    nearness: float,
    looks_up: Tensor,
    recipe: Recipe,
) -> MemoryLayer:
    """One layer, N = 1, in float32 on the CPU."""
    k, v = (x.float().cpu() for x in kv)
    counts = torch.tensor([len(mine) for mine in kept])
    projection, keys, o, lse = entries[:4]
    if not looks_up.any():
        # Nobody reads what they answer.
        o, lse = torch.zeros_like(o), torch.zeros_like(lse)
    return MemoryLayer(
        projection=projection[None],
        keys=keys,
        key_indptr=torch.tensor([0, len(keys)], dtype=torch.int32),
        place_weight=torch.tensor([recipe.place_weight]),
        nearness=torch.tensor([nearness]),
        prefix_tokens=torch.tensor([k.shape[1]], dtype=torch.int32),
        o=o,
        lse=lse,
        looks_up=looks_up[None],
        kept_k=torch.cat([k[head, mine] for head, mine in enumerate(kept)]),
        kept_v=torch.cat([v[head, mine] for head, mine in enumerate(kept)]),
        kept_indptr=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
    )

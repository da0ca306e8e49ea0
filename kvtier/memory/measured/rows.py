"""A card's rows: what held-out requests, requests in new wording and requests that have nothing to
do with the prefix lose by a memory, beside other ways to hold the prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvtier.heads.model.config import shape_of
from kvtier.heads.profile import ModelShape
from kvtier.heads.progress import Progress, no_progress
from kvtier.memory.building import most_drawn
from kvtier.memory.card import Row
from kvtier.memory.measured.losses import EXACT, RequestLoss, losses, mean_loss, requeued
from kvtier.memory.measured.sizes import exact_bytes, held_bytes, kept_bytes, read_bytes
from kvtier.memory.prefixes import KeptPrefix, LayerKV, MemoryPrefix, NoPrefix, Prefix
from kvtier.memory.traces import Trace
from kvtier_kernels.memory.base import MemoryLayer

# The ways that a card compares.
MEMORY, UNGATED, NONE = "memory", "memory without its gate", "nothing"
KEPT_HELD, KEPT_READ = "kept KV, as many bytes", "kept KV, as many bytes read"
RANDOM = "random KV, as many bytes"


class Way(NamedTuple):
    """A way to hold a prefix, and its costs.

    bytes_read:    for a token none of whose lookups falls back, where there are lookups
    requeue_above: share of a prompt's lookups that fall back above which a request is read with the
                   exact prefix
    """

    prefix: Prefix
    bytes_held: int
    bytes_read: int
    requeue_above: float = 1.0


class Held(NamedTuple):
    """A prefix, and a memory of it.

    drawn: per layer, float32 `[kv_heads, prefix tokens]`, the most that any query gave to each
           token (collecting.py)
    """

    kv: Sequence[LayerKV]
    drawn: Sequence[Tensor]
    layers: Sequence[MemoryLayer]
    dtype: torch.dtype


def ways(shape: ModelShape, held: Held, requeue_above: float, seed: int = 0) -> dict[str, Way]:
    """Return the memory's way and those that it is compared with."""
    mine, reads = held_bytes(held.layers, held.dtype), read_bytes(held.layers, held.dtype, 0.0)
    rng = torch.Generator().manual_seed(seed)
    random = [torch.rand(drawn.shape, generator=rng) for drawn in held.drawn]
    found = {
        NONE: Way(NoPrefix(), 0, 0),
        MEMORY: Way(MemoryPrefix(held.layers), mine, reads, requeue_above),
        UNGATED: Way(MemoryPrefix(held.layers, gated=False), mine, reads),
        RANDOM: kept_way(shape, held, random, mine),
    }
    if any(bool(layer.looks_up.any()) for layer in held.layers):
        found[KEPT_HELD] = kept_way(shape, held, held.drawn, mine)
        found[KEPT_READ] = kept_way(shape, held, held.drawn, reads)
    return found


def kept_way(shape: ModelShape, held: Held, worth: Sequence[Tensor], size: int) -> Way:
    """Return the way that keeps as much of a prefix's KV as so many bytes hold, by what it is
    worth: see `most_drawn`."""
    entry = kept_bytes(shape, 1, held.dtype)
    kept = most_drawn(worth, size // entry)
    size = entry * sum(len(head) for layer in kept for head in layer)
    return Way(KeptPrefix(held.kv, kept), size, size)


def rows(
    model: Any,
    held: Held,
    asked: Mapping[str, Sequence[Trace]],
    compared: Mapping[str, Way],
    *,
    off_topic: str | None = None,
    progress: Progress = no_progress,
) -> dict[str, list[Row]]:
    """Return for each kind of requests their losses by each way, the exact prefix first.

    off_topic: the kind whose KL is over all tokens, because no answer of its is the right one.
    """
    shape = shape_of(model)
    length = held.kv[0][0].shape[1]
    whole = exact_bytes(shape, length, held.dtype)
    found: dict[str, list[Row]] = {}
    for kind, requests in asked.items():
        if not requests:
            continue
        prefixes = {name: way.prefix for name, way in compared.items()}
        lost = losses(
            model, held.kv, prefixes, requests, every_token=kind == off_topic, progress=progress
        )
        exact = lost[EXACT]
        found[kind] = [_row(EXACT, exact, exact, whole, whole)]
        for name, way in compared.items():
            again = sum(one.fell_back > way.requeue_above for one in lost[name]) / len(exact)
            mine = requeued(lost[name], exact, way.requeue_above)
            reads = way.bytes_read
            if isinstance(way.prefix, MemoryPrefix):
                fell = mean_loss(mine).fell_back if way.prefix.gated else 0.0
                reads = read_bytes(way.prefix.layers, held.dtype, fell)
                # A request that began again reads the exact prefix.
                reads = round((1 - again) * reads + again * whole)
            row = _row(name, mine, exact, way.bytes_held, reads)
            found[kind].append(row.model_copy(update={"requeued": again}))
    return found


def _row(
    name: str, mine: Sequence[RequestLoss], exact: Sequence[RequestLoss], held: int, read: int
) -> Row:
    loss, whole = mean_loss(mine), mean_loss(exact)
    return Row(
        way=name,
        requests=len(mine),
        nll_gap=loss.nll - whole.nll,
        kl=max(0.0, loss.kl),
        right=loss.right,
        bytes_held=held,
        bytes_read=read,
        fell_back=loss.fell_back,
    )


def refusals(
    found: Mapping[str, Sequence[Row]], held_out: str, off_topic: str, target_nats: float
) -> list[str]:
    """Return the reasons why a memory must not be served; none where it may be."""
    by_kind = {kind: {row.way: row for row in some} for kind, some in found.items()}
    mine, reasons = by_kind[held_out][MEMORY], []
    if mine.nll_gap > target_nats:
        reasons.append(
            f"held-out requests lose {mine.nll_gap:.3f} nats per token, {target_nats:g} are allowed"
        )
    if off_topic in by_kind:
        gated, none = by_kind[off_topic][MEMORY].kl, by_kind[off_topic][NONE].kl
        if gated >= none:
            reasons.append(
                f"requests off its topic are further from the exact prefix ({gated:.2f} nats) than "
                f"without any prefix ({none:.2f})"
            )
    if mine.bytes_read >= by_kind[held_out][EXACT].bytes_read:
        reasons.append("a token reads as many bytes as of the exact prefix")
    kept = by_kind[held_out].get(KEPT_HELD)
    if kept and kept.nll_gap <= mine.nll_gap and kept.bytes_read <= mine.bytes_read:
        reasons.append("as many bytes of the prefix's own KV lose less and read less")
    return reasons


__all__ = [
    "KEPT_HELD",
    "KEPT_READ",
    "MEMORY",
    "NONE",
    "RANDOM",
    "UNGATED",
    "Held",
    "Way",
    "kept_way",
    "refusals",
    "rows",
    "ways",
]

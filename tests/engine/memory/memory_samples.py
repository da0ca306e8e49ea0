"""Prefix memories of the demo model for tests: built of made-up traces, and stored."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

from engine_process import DEMO_MODEL
from sessions import tokens

from kvtier.memory.building import JUDGING_SHARE, assemble, collected, with_requeueing
from kvtier.memory.card import Identity
from kvtier.memory.collecting import prefix_kv
from kvtier.memory.recipe import Recipe
from kvtier.memory.storage import Card, PrefixMemory, load, save
from kvtier.memory.traces import Trace, split


class Stored(NamedTuple):
    """A memory in its directory."""

    folder: Path
    memory: PrefixMemory

    @property
    def prefix(self) -> list[int]:
        return list(self.memory.prefix_ids)


def make_memory(model: Any, folder: Path, length: int, recipe: Recipe, seed: int) -> Stored:
    rng = random.Random(seed)
    prefix = tokens(rng, length)
    traces = [
        Trace(tuple(tokens(rng, rng.randrange(8, 30))), tuple(tokens(rng, 4))) for _ in range(24)
    ]
    kv = prefix_kv(model, prefix)
    making, judging = split(traces, JUDGING_SHARE, 0)
    built = assemble(kv, *collected(model, kv, making, judging, recipe), recipe)
    built = with_requeueing(model, built, judging)
    card = Card(
        model="kvtier-demo", identity=Identity.of(str(DEMO_MODEL), "float32", prefix), recipe={},
        requeue_above=1.0, traces={}, least_members=1, positions=34, build_seconds=0, rows={},
        target_nats=1, refusals=[],
    )  # fmt: skip
    save(folder, card, prefix, built.layers)
    return Stored(folder, load(folder))

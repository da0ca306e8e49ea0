"""The work of `kvtier memory build` and `kvtier memory verify`, from files to files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvtier.errors import MemoryMismatchError, UsageError
from kvtier.heads.model.config import model_name, read_config, shape_of
from kvtier.heads.model.loading import load_model
from kvtier.heads.model.support import check_supported
from kvtier.heads.progress import Progress, no_progress
from kvtier.memory.building import (
    JUDGING_SHARE,
    Built,
    assemble,
    collected,
    max_attention_of,
    with_requeueing,
)
from kvtier.memory.card import Identity, Row
from kvtier.memory.collecting import prefix_kv
from kvtier.memory.measured import (
    Held,
    Way,
    held_bytes,
    off_topic_requests,
    read_bytes,
    refusals,
    rows,
    ways,
)
from kvtier.memory.prefixes import LayerKV, MemoryPrefix
from kvtier.memory.recipe import Recipe
from kvtier.memory.storage import Card, load, save
from kvtier.memory.traces import Trace, Traced, read_traces, split
from kvtier.synthetic.tokenizer import Tokenizer

# The share of the traces that a card is measured on.
HELD_OUT_SHARE = 0.25
OFF_TOPIC_REQUESTS = 40
# The kinds of requests of a card's rows.
HELD_OUT, OFF_TOPIC = "held-out requests", "requests off its topic"
# Shares of what is kept, and of the entries, whose memories a card compares.
CURVE = (0.25, 0.5)


@dataclass(frozen=True)
class Source:
    """The source of a memory. chat: the prefix is a system message; see traces.py."""

    model_path: str
    prefix: str
    traces: Path
    chat: bool = False
    seed: int = 0


class _Material:
    """The parts of a source that a memory of it is built and measured from."""

    def __init__(self, source: Source, recipe: Recipe, progress: Progress) -> None:
        check_supported(read_config(source.model_path))
        tokenizer = Tokenizer(source.model_path)
        self.traced: Traced = read_traces(source.traces, source.prefix, tokenizer, chat=source.chat)
        for trace in self.traced.traces:
            if not trace.answer_ids:
                raise UsageError("--traces", "an answer in every trace", "a trace without one")
        known, self.held_out = split(self.traced.traces, HELD_OUT_SHARE, source.seed)
        self.making, self.judging = split(known, JUDGING_SHARE, source.seed)
        self.off_topic = off_topic_requests(
            tokenizer, source.model_path, OFF_TOPIC_REQUESTS, source.seed
        )
        self.model: Any = load_model(source.model_path)
        self.kv: list[LayerKV] = prefix_kv(self.model, self.traced.prefix_ids)
        self.made, self.judged = collected(
            self.model, self.kv, self.making, self.judging, recipe, progress
        )

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.model.dtype
        return found

    @property
    def asked(self) -> Mapping[str, Sequence[Trace]]:
        return {HELD_OUT: self.held_out, OFF_TOPIC: self.off_topic}

    def held(self, built: Built) -> Held:
        drawn = max_attention_of(self.made, self.judged)
        return Held(self.kv, drawn, built.layers, self.dtype)


def make(
    source: Source,
    out: Path,
    recipe: Recipe,
    *,
    target_nats: float,
    progress: Progress = no_progress,
) -> Card:
    """Build a memory, measure it, and write its directory, whether or not it may be served.

    Raises UsageError and TracesFileError for what cannot be built from.
    """
    began = time.monotonic()
    material = _Material(source, recipe, progress)
    built = assemble(material.kv, material.made, material.judged, recipe, source.seed)
    built = with_requeueing(material.model, built, material.judging)
    build_seconds = time.monotonic() - began
    found = _measured(material, built, source.seed, progress)
    found["smaller memories"] = _curve(material, recipe, source.seed, progress)
    identity = Identity.of(source.model_path, _name(material.dtype), material.traced.prefix_ids)
    longest = max(len(trace.ids) for trace in material.traced.traces)
    card = Card(
        model=model_name(source.model_path),
        revision=identity.revision,
        identity=identity,
        recipe={**asdict(recipe), "seed": source.seed},
        requeue_above=built.requeue_above,
        traces={
            "making": len(material.making),
            "judging": len(material.judging),
            "held_out": len(material.held_out),
        },
        least_members=min(int(one.min()) for one in built.members),
        positions=longest,
        build_seconds=build_seconds,
        rows=found,
        target_nats=target_nats,
        refusals=refusals(found, HELD_OUT, OFF_TOPIC, target_nats),
    )
    return save(out, card, material.traced.prefix_ids, built.layers)


def verify(source: Source, folder: Path, progress: Progress = no_progress) -> dict[str, list[Row]]:
    """A stored memory's rows, measured again from the same source.

    Raises MemoryFileError and MemoryMismatchError for a memory that is damaged, or of something
    else.
    """
    memory = load(folder)
    # Nothing is made: what traces draw of the prefix is all that is needed of them.
    material = _Material(source, Recipe(), progress)
    memory.card.identity.check_serves(
        Identity.of(source.model_path, _name(material.dtype), material.traced.prefix_ids)
    )
    if int(memory.card.recipe.get("seed") or 0) != source.seed:
        raise MemoryMismatchError(f"memory: made with --seed {memory.card.recipe.get('seed')}")
    built = Built(memory.layers, (), None, memory.card.requeue_above)
    return _measured(material, built, source.seed, progress)


def _measured(
    material: _Material, built: Built, seed: int, progress: Progress
) -> dict[str, list[Row]]:
    held = material.held(built)
    compared = ways(shape_of(material.model), held, built.requeue_above, seed)
    return rows(
        material.model, held, material.asked, compared, off_topic=OFF_TOPIC, progress=progress
    )


def _curve(material: _Material, recipe: Recipe, seed: int, progress: Progress) -> list[Row]:
    """Held-out requests behind memories that keep less, and have fewer entries."""
    compared: dict[str, Way] = {}
    for share in CURVE:
        fewer = replace(
            recipe,
            kept_share=share * recipe.kept_share,
            entries=max(1, round(share * recipe.entries)),
        )
        layers = assemble(material.kv, material.made, material.judged, fewer, seed).layers
        compared[f"{share:g} of it"] = Way(
            MemoryPrefix(layers),
            held_bytes(layers, material.dtype),
            read_bytes(layers, material.dtype, 0.0),
        )
    held = Held(material.kv, [], [], material.dtype)
    asked = {HELD_OUT: material.held_out}
    return rows(material.model, held, asked, compared, progress=progress)[HELD_OUT]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

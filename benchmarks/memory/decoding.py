"""The cost of a token behind a fixed prefix, however long that is.

    python -m benchmarks.memory.decoding --lens 8k 32k 128k

One session of the demo model's shape, one request at a time, behind a prefix of random tokens: with
the prefix's whole KV, with some of it kept, and with a memory of attention states. What is kept has
as many bytes as the memory. The memory answers every token by its states, as traces that the card
allows are answered; how well is `memory.prefix_quality`'s question.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.bars import at_most
from benchmarks.common.benchmark import RESULTS, ROOT, Arguments, Benchmark, Measured, Options
from benchmarks.common.table import new_table, show
from benchmarks.cost.engine import engine_arguments, serve
from benchmarks.gpu.serving_worker import Load, Plan
from kvtier.heads.model.config import shape_of
from kvtier.heads.model.loading import load_model
from kvtier.memory.building import assemble
from kvtier.memory.card import Identity
from kvtier.memory.collecting import collect, prefix_kv
from kvtier.memory.measured import exact_bytes, held_bytes
from kvtier.memory.recipe import Recipe
from kvtier.memory.storage import Card, save
from kvtier.memory.traces import Trace, split
from kvtier.sizes import format_size
from kvtier_kernels.memory.base import MemoryLayer

IDS = (6, 384)
TURNS, TURN_TOKENS, SLACK_TOKENS = 3, 16, 4096
TRACES, TRACE_TOKENS = 80, 24
# The most that a token may take behind the longest prefix, beside the shortest.
FLAT = 1.1
FULL, KEPT, MEMORY = "whole KV", "kept KV", "memory"


def declare(arguments: Arguments) -> None:
    arguments.sizes("--lens", ("8k", "32k", "128k"), "prefix tokens")
    arguments.whole("--entries", 1024, "attention states of the memory, a layer")
    arguments.whole("--answer-tokens", 64, "of every answer", least=2)


def run(options: Options) -> Iterator[Measured]:
    """Length by length; the last is judged."""
    model_path = ROOT / "models" / "kvtier-demo"
    rows: list[dict[str, Any]] = []
    table = new_table(
        f"Time a token behind a prefix, {options.entries} entries",
        ("prefix", *(f"{name}, ms" for name in (FULL, KEPT, MEMORY)), "whole / memory",
         "kept / memory", "MiB held: whole", "kept", "memory"),
    )  # fmt: skip
    for length in options.lens:
        with tempfile.TemporaryDirectory(prefix="kvtier-memory-") as name:
            rows.append(measure(model_path, length, Path(name), options))
        row = rows[-1]
        ms, held = row["tpot_ms"], row["held_bytes"]
        table.add_row(
            format_size(length),
            *(f"{ms[way]:.2f}" for way in (FULL, KEPT, MEMORY)),
            f"{ms[FULL] / ms[MEMORY]:.2f}x",
            f"{ms[KEPT] / ms[MEMORY]:.2f}x",
            *(f"{held[way] / 2**20:.1f}" for way in (FULL, KEPT, MEMORY)),
        )
        flat = rows[-1]["tpot_ms"][MEMORY] / rows[0]["tpot_ms"][MEMORY]
        name = f"a token behind {format_size(length)}, beside {format_size(rows[0]['prefix'])}"
        yield Measured({"entries": options.entries, "rows": rows}, [at_most(name, flat, FLAT)])
    show(table)


def measure(model_path: Path, length: int, folder: Path, options: Options) -> dict[str, Any]:
    """Three engines behind one prefix."""
    rng = random.Random(options.seed)
    prefix = [rng.randrange(*IDS) for _ in range(length)]
    held = write_memories(model_path, prefix, rng, folder, options)
    plan = make_plan(model_path, prefix, options)
    found = {
        FULL: serve(plan, folder),
        KEPT: serve(plan, folder, memory=folder / KEPT),
        MEMORY: serve(plan, folder, memory=folder / MEMORY),
    }
    return {
        "prefix": length,
        "tpot_ms": {way: 1000 * one["tpot_s"] for way, one in found.items()},
        "ttft_ms": {way: 1000 * one["first_turn_ttft_s"] for way, one in found.items()},
        "held_bytes": held,
    }


def write_memories(
    model_path: Path, prefix: list[int], rng: random.Random, folder: Path, options: Options
) -> dict[str, int]:
    """Two memories of the prefix; what each way holds of it, in bytes."""
    model = load_model(str(model_path))
    shape = shape_of(model)
    traces = [
        Trace(tuple(rng.randrange(*IDS) for _ in range(TRACE_TOKENS)), ()) for _ in range(TRACES)
    ]
    kv = prefix_kv(model, prefix)
    making, judging = split(traces, 0.2, options.seed)
    made = collect(model, kv, making)
    judged = collect(model, kv, judging, with_own=True)
    # No lookup falls back, so that what is timed is the states alone.
    recipe = Recipe(0.01, options.entries, state_heads=1.0, gate=0)
    layers = assemble(kv, made, judged, recipe, options.seed).layers
    size, whole = held_bytes(layers, model.dtype), exact_bytes(shape, len(prefix), model.dtype)
    kept = assemble(kv, made, judged, Recipe(min(1.0, size / whole), entries=1, gate=0)).layers
    store(folder / MEMORY, model_path, prefix, layers)
    store(folder / KEPT, model_path, prefix, kept)
    return {FULL: whole, KEPT: held_bytes(kept, model.dtype), MEMORY: size}


def store(
    folder: Path, model_path: Path, prefix: list[int], layers: tuple[MemoryLayer, ...]
) -> None:
    """A memory whose card says nothing of its quality: it is timed."""
    identity = Identity.of(str(model_path), "float32", prefix)
    card = Card(
        model=identity.model, identity=identity, recipe={}, requeue_above=1.0, traces={},
        least_members=1, positions=TRACE_TOKENS, build_seconds=0, rows={}, target_nats=0,
        refusals=[],
    )  # fmt: skip
    save(folder, card, prefix, layers)


def make_plan(model_path: Path, prefix: list[int], options: Options) -> Plan:
    chunk = 4096
    session = len(prefix) + TURNS * (TURN_TOKENS + options.answer_tokens)
    engine = engine_arguments(model_path, chunk, session + chunk + SLACK_TOKENS, options.seed)
    engine |= {"attention_backend": "kvtier", "radix_cache_backend": "kvtier"}
    load = Load(
        sessions=1, context=TURN_TOKENS, turns=TURNS, turn_tokens=TURN_TOKENS,
        answer_tokens=options.answer_tokens, chunk=chunk, ids=IDS, seed=options.seed,
        prefix=tuple(prefix),
    )  # fmt: skip
    return Plan(engine=engine, load=load)


BENCHMARK = Benchmark(
    "memory.decoding", __doc__, declare, run, out=RESULTS / "memory-decoding.json",
    seeded="of all tokens",
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())

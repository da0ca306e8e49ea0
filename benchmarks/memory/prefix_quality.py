"""The loss of requests where a fixed prefix is held as a memory, beside other ways to hold it.

    python -m benchmarks.memory.prefix_quality --model-path out/smollm2

Three families of requests: labels that only the prefix's examples define, calls of tools that only
the prefix describes, answers in a format that only the prefix prescribes. Of each, traces make the
memories, and others are measured: in the wording of the traces, in other wording, and requests that
have nothing to do with the prefix. Every way is compared with the exact prefix: nats that the right
answer loses, and KL, over bytes held and bytes that a generated token reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.bars import Bar, at_most
from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.table import new_table, show
from benchmarks.memory.families import FAMILIES, Request, make_family, off_topic_requests
from kvtier.heads.model.config import shape_of
from kvtier.heads.model.loading import load_model
from kvtier.heads.profile import ModelShape, full_profile
from kvtier.heads.progress import Progress, rich_progress
from kvtier.heads.reference.compaction import ScoredSession
from kvtier.memory.building import (
    JUDGING_SHARE,
    Built,
    assemble,
    collected,
    max_attention_of,
    with_requeueing,
)
from kvtier.memory.card import Row
from kvtier.memory.collecting import prefix_kv
from kvtier.memory.measured import Held, Way, exact_bytes, held_bytes, kept_way, read_bytes, rows
from kvtier.memory.prefixes import KeptPrefix, LayerKV, MemoryPrefix, NoPrefix
from kvtier.memory.recipe import Recipe
from kvtier.memory.traces import Trace, split, tokenized
from kvtier.retention.locality import LocalityRule
from kvtier.retention.scorers import SCORERS
from kvtier.synthetic.tokenizer import Tokenizer

HELD_OUT, NEW_WORDING, OFF_TOPIC = "held out", "new wording", "off topic"
NOTHING = "nothing"
TARGET_NATS = 0.05
SHARE_HELD, SHARE_READ = 0.35, 0.10
OURS = ("memory", "states", "hybrid", "kept")
# The shares of the prefix's KV that other choices keep, and those of the gated ways.
SHARES = (0.2, 0.35)
KEPT_SHARES, STATES = (0.05, 0.1, 0.2, 0.35), (256, 1024, 4096)
MEMORY_SHARE, HYBRID_SHARE, FALL_BACK_SHARE = 0.2, 0.1, 0.05
STATE_HEADS = 0.5
# A prefix is computed in so many chunks, each without the others.
CHUNKS = 4


def declare(arguments: Arguments) -> None:
    arguments.add("--model-path", type=Path, required=True, help="local model directory")
    arguments.add("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    arguments.whole("--traces", 220, "traces of a family")
    arguments.whole("--held-out", 120, "requests of a family in the traces' wording")
    arguments.whole("--new-wording", 40, "of those in other wording")
    arguments.whole("--off-topic", 40, "requests that have nothing to do with it")


def run(options: Options) -> Iterator[Measured]:
    """Family by family; the table as far as it is after each."""
    model = load_model(str(options.model_path))
    tokenizer = Tokenizer(str(options.model_path))
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    for name in options.families:
        with rich_progress() as progress:
            found = measure(model, tokenizer, name, options, progress)
        figures[name] = {kind: [row.model_dump() for row in some] for kind, some in found.items()}
        bars += judged(name, found)
        for kind, some in found.items():
            show_rows(f"{name}, {kind}", some)
        yield Measured({"model": options.model_path.name, "families": figures}, bars)


def measure(
    model: Any, tokenizer: Tokenizer, name: str, options: Options, progress: Progress
) -> dict[str, list[Row]]:
    """Rows of one family, by kind of requests."""
    family = make_family(name, options.seed, traces=options.traces, held_out=options.held_out)
    kinds = {
        "traces": family.traces,
        HELD_OUT: family.held_out,
        NEW_WORDING: family.new_wording[: options.new_wording],
        OFF_TOPIC: off_topic_requests(options.seed, options.off_topic),
    }
    texts = [
        (f"{kind} {at}", request.prompt, request.answer, request.template)
        for kind, requests in kinds.items()
        for at, request in enumerate(requests)
    ]
    traced = tokenized(texts, family.prefix, tokenizer)
    asked = by_kind(traced.traces, kinds)
    kv = prefix_kv(model, traced.prefix_ids)
    making, judging = split(asked.pop("traces"), JUDGING_SHARE, options.seed)
    recipes = all_recipes()
    # States want the most of all that is compared.
    most = max(recipes.values(), key=lambda recipe: recipe.state_heads)
    made, judges = collected(model, kv, making, judging, most, progress)
    shape = shape_of(model)
    held = Held(kv, max_attention_of(made, judges), (), model.dtype)
    compared = dict[str, Way]()
    for way, recipe in recipes.items():
        built = assemble(held.kv, made, judges, recipe, options.seed)
        compared |= served(way, with_requeueing(model, built, judging), model.dtype)
    compared |= kept(model, shape, held, traced.prefix_ids, options)
    chunk = -(-len(traced.prefix_ids) // CHUNKS)
    apart = prefix_kv(model, traced.prefix_ids, chunk_tokens=chunk)
    whole = exact_bytes(shape, len(traced.prefix_ids), model.dtype)
    everything = [[torch.arange(len(traced.prefix_ids))] * shape.num_kv_heads] * len(kv)
    compared[f"all KV, computed in {CHUNKS} chunks apart"] = Way(
        KeptPrefix(apart, everything), whole, whole
    )
    return rows(model, held, asked, compared, off_topic=OFF_TOPIC, progress=progress)


def by_kind(
    traces: Sequence[Trace], kinds: Mapping[str, Sequence[Request]]
) -> dict[str, Sequence[Trace]]:
    """The traces of each kind, which lie behind one another."""
    found, begin = {}, 0
    for kind, requests in kinds.items():
        found[kind] = traces[begin : begin + len(requests)]
        begin += len(requests)
    return found


def all_recipes() -> dict[str, Recipe]:
    """Return the recipes: kept KV behind a gate, states in all heads, and states in the half of
    them that they serve best."""
    recipes = {"memory": Recipe(kept_share=MEMORY_SHARE)}
    for entries in STATES:
        states = Recipe(FALL_BACK_SHARE, entries, state_heads=1.0)
        recipes[f"states, {entries} entries"] = states
    recipes[f"hybrid, {STATES[-1]} entries"] = Recipe(
        HYBRID_SHARE, STATES[-1], state_heads=STATE_HEADS
    )
    return recipes


def served(way: str, built: Built, dtype: torch.dtype) -> dict[str, Way]:
    """A memory with its gate, where requests begin again as a server has them do it, and, of the
    largest ones, without."""
    size, read = held_bytes(built.layers, dtype), read_bytes(built.layers, dtype, 0.0)
    ways = {way: Way(MemoryPrefix(built.layers), size, read, built.requeue_above)}
    if way == "memory" or way.endswith(f" {STATES[-1]} entries"):
        ways[f"{way}, no gate"] = Way(MemoryPrefix(built.layers, gated=False), size, read)
    return ways


def kept(
    model: Any, shape: ModelShape, held: Held, prefix_ids: Sequence[int], options: Options
) -> dict[str, Way]:
    """Return ways that keep some of the prefix's own KV, chosen in five ways, and nothing."""
    rng = torch.Generator().manual_seed(options.seed)
    whole = exact_bytes(shape, len(prefix_ids), model.dtype)
    ways = {NOTHING: Way(NoPrefix(), 0, 0)}
    for share in KEPT_SHARES:
        ways[f"kept, {share:.0%}"] = kept_way(shape, held, held.drawn, round(share * whole))
    others: dict[str, Sequence[Tensor]] = {"kept by every head alike": held.drawn}
    for name in ("compactor", "keydiff"):
        others[name] = scores(model, held.kv, prefix_ids, name)
    others["random"] = [torch.rand(drawn.shape, generator=rng) for drawn in held.drawn]
    for name, by_layer in others.items():
        for share in SHARES:
            tokens = round(share * len(prefix_ids))
            chosen = [list(layer.topk(tokens).indices.sort().values) for layer in by_layer]
            size = exact_bytes(shape, tokens, model.dtype)
            ways[f"{name}, {share:.0%}"] = Way(KeptPrefix(held.kv, chosen), size, size)
    return ways


def scores(model: Any, kv: Sequence[LayerKV], prefix_ids: Sequence[int], name: str) -> list[Tensor]:
    """Return a token scorer's scores of the prefix, per layer `[kv_heads, tokens]`."""
    rule = LocalityRule(1, 1, 1)
    scorer = SCORERS[name]()
    session = ScoredSession(model, full_profile(shape_of(model)), rule, scorer=scorer)
    session.turn(prefix_ids, 0)
    heads = range(kv[0][0].shape[0])
    return [session.scores(layer, heads, k, v, 0) for layer, (k, v) in enumerate(kv)]


def judged(name: str, found: Mapping[str, Sequence[Row]]) -> list[Bar]:
    """Return the bars: whether the best of ours is within the target for a third of the bytes or a
    tenth of the reads, and whether a gate helps where a memory knows nothing."""
    exact, *others = found[HELD_OUT]
    ours = [row for row in others if row.way.split(",")[0] in OURS and "no gate" not in row.way]
    cheap = [
        row
        for row in ours
        if row.bytes_held <= SHARE_HELD * exact.bytes_held
        or row.bytes_read <= SHARE_READ * exact.bytes_read
    ]
    best = min(cheap, key=lambda row: row.nll_gap)
    off = {row.way: row.kl for row in found[OFF_TOPIC]}
    gated = [way for way in off if way.startswith(OURS[:3]) and "no gate" not in way]
    worst = max(gated, key=off.__getitem__)
    return [
        at_most(f"{name}: nats lost by {best.way}", best.nll_gap, TARGET_NATS),
        at_most(f"{name}: off-topic KL of {worst}, beside nothing's", off[worst], off[NOTHING]),
    ]


def show_rows(title: str, some: Sequence[Row]) -> None:
    table = new_table(
        f"{title} ({some[0].requests} requests)",
        ("held", "nats lost", "KL", "right", "% held", "% read", "fell back", "began again"),
    )
    for row in some:
        table.add_row(
            row.way,
            f"{row.nll_gap:.3f}",
            f"{row.kl:.3f}",
            f"{row.right:.2f}",
            f"{100 * row.bytes_held / some[0].bytes_held:.1f}",
            f"{100 * row.bytes_read / some[0].bytes_read:.1f}",
            f"{row.fell_back:.0%}",
            f"{row.requeued:.0%}",
        )
    show(table)


BENCHMARK = Benchmark(
    "memory.prefix_quality", __doc__, declare, run, out=RESULTS / "memory-quality.json"
)
main = BENCHMARK.main

if __name__ == "__main__":
    main()

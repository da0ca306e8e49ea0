"""The cost of choosing beside the attention that computes a context: one head, on this CPU.

    python -m benchmarks.cost.choosing

A KV head of Llama-3.1-8B's shape (4 query heads, dim 128), float32, random keys of which some are
alike:

    prefill     causal attention of the context, by torch's scaled_dot_product_attention
    selection   Compactor's scores and the best quarter of each head
    merge       KeepKV's prediction, the best quarter, the rest merged into it

All heads of all layers do the same, so one is measured, and the ratio is that of 8 times 32. The
attention is computed chunk after chunk, as a server does it, and after each chunk everything is
chosen once, so that whatever else the machine does meets both.

    chunk 1     |--|
    chunk 2     |==|--|         -- causal    == all of the prefix
    chunk 3     |==|==|--|

On a GPU `make gpu-check` measures the same against the fastest kernel there.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from rich.table import Table

from benchmarks.common.bars import Bar, at_most
from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.llama import DIM, GROUP
from benchmarks.common.table import new_table, show
from benchmarks.common.timing import seconds
from benchmarks.cost.choosing_context import (
    KEPT,
    MOST_CHOOSING,
    Context,
    attend,
    make_context,
    make_parts,
    merge,
    select,
)
from kvtier.errors import UsageError
from kvtier.retention.keepkv import KeepKV
from kvtier.retention.scorers.compactor import Compactor
from kvtier.sizes import format_size


def declare(arguments: Arguments) -> None:
    arguments.size("--len", "128k", "context tokens")
    arguments.whole("--kv-heads", 1, "to measure")
    arguments.whole("--chunks", 4, "of the prefill")


def run(options: Options) -> Measured:
    """Measure one head's prefill attention, selection and merge."""
    tokens = options.len
    if options.chunks > tokens:
        raise UsageError("--chunks", f"at most {tokens}", options.chunks)
    # Code is loaded and memory is asked for once before it counts.
    shape = (torch.float32, "cpu", options.kv_heads)
    measure(make_context(options.seed, 1024, *shape), 1)
    measured = measure(make_context(options.seed, tokens, *shape), options.chunks)
    show(make_table(measured, tokens))
    settings = {
        "context_tokens": tokens,
        "chunks": options.chunks,
        "kept": KEPT,
        "kv_heads": options.kv_heads,
        "query_heads_per_kv_head": GROUP,
        "head_dim": DIM,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
    }
    return Measured({"settings": settings, "measured": measured}, make_bars(measured))


def measure(context: Context, chunks: int) -> dict[str, Any]:
    """Seconds of every chunk's attention, and of choosing after each."""
    compactor, keepkv = Compactor(), KeepKV()
    prefill, selection, merging = [], [], []
    bounds = [round(context.tokens * at / chunks) for at in range(chunks + 1)]
    for begin, end in pairwise(bounds):
        prefill.append(seconds(partial(attend_chunk, context, slice(begin, end))))
        selection.append(seconds(lambda: select(context, compactor)))
        merging.append(seconds(lambda: merge(context, keepkv)))
        print(f"chunk of {end} tokens: {prefill[-1]:.1f} s", file=sys.stderr, flush=True)
    return {
        "prefill_chunks_s": prefill,
        "selection_s": selection,
        "merge_s": merging,
        "parts_s": {name: seconds(call) for name, call in make_parts(context).items()},
    }


def attend_chunk(context: Context, rows: slice) -> None:
    """Attend from some of the context's tokens to all of it before them, and to themselves.

    The merge of the two is left out, so that attention is a little faster here than it is.
    """
    attend(context.q[rows], context.k[rows], context.v[rows], causal=True)
    if rows.start > 0:
        attend(context.q[rows], context.k[: rows.start], context.v[: rows.start], causal=False)


def choosing_seconds(measured: dict[str, Any]) -> dict[str, float]:
    """Medians of choosing once, and their sum."""
    taken = {name: statistics.median(measured[f"{name}_s"]) for name in ("selection", "merge")}
    return taken | {"selection + merge": sum(taken.values())}


def make_bars(measured: dict[str, Any]) -> list[Bar]:
    """Shares of the attention's time: medians of choosing over the sum of all chunks."""
    prefill = sum(measured["prefill_chunks_s"])
    return [
        at_most(f"{name} / prefill attention", value / prefill, MOST_CHOOSING)
        for name, value in choosing_seconds(measured).items()
    ]


def make_table(measured: dict[str, Any], tokens: int) -> Table:
    """Everything that was measured, a line each."""
    prefill = sum(measured["prefill_chunks_s"])
    title = f"{format_size(tokens)} tokens, on {torch.get_num_threads()} threads"
    table = new_table(title, ("what", "seconds", "of attention"))
    table.add_row("prefill attention", f"{prefill:.1f}", "")
    for name, taken in measured["parts_s"].items():
        table.add_row(f"  {name}", f"{taken:.2f}", f"{taken / prefill:.2%}")
    for name, taken in choosing_seconds(measured).items():
        table.add_row(name, f"{taken:.2f}", f"{taken / prefill:.2%}")
    return table


BENCHMARK = Benchmark(
    "cost.choosing",
    __doc__,
    declare,
    run,
    out=RESULTS / "choosing.json",
    seeded="of the context",
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())

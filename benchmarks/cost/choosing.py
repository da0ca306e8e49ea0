"""What choosing costs beside the attention that computes a context: one head, on this CPU.

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

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.common.command import ROOT, run_command
from benchmarks.cost.choosing_context import (
    DIM,
    GROUP,
    KEPT,
    MOST_CHOOSING,
    Context,
    attend,
    make_context,
    make_parts,
    merge,
    select,
)
from kvtier.bench.table import make_console
from kvtier.environment import describe_environment
from kvtier.errors import UsageError
from kvtier.retention.keepkv import KeepKV
from kvtier.retention.scorers.compactor import Compactor
from kvtier.sizes import format_size, parse_size

SCHEMA_VERSION = 1
OUT = ROOT / "benchmarks" / "results" / "choosing.json"


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 when the bar is met, 1 when it is not, 2 for bad input."""
    return run_command("choosing", parse_arguments(argv), run)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.cost.choosing", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--out", type=Path, default=OUT, metavar="FILE", help="JSON of the outcome (%(default)s)")
    add("--len", default="128k", help="context tokens (%(default)s)")
    add("--kv-heads", type=int, default=1, help="to measure (%(default)s)")
    add("--chunks", type=int, default=4, help="of the prefill (%(default)s)")
    add("--seed", type=int, default=0, help="of the context (%(default)s)")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, and return the outcome."""
    tokens = parse_size(options.len, "--len")
    if not 1 <= options.chunks <= tokens:
        raise UsageError("--chunks", f"1 to {tokens}", options.chunks)
    for name, least in (("kv-heads", 1), ("seed", 0)):
        if (value := getattr(options, name.replace("-", "_"))) < least:
            raise UsageError(f"--{name}", f"at least {least}", value)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    environment = describe_environment(options.seed).model_dump()
    # Code is loaded and memory is asked for once before it counts.
    shape = (torch.float32, "cpu", options.kv_heads)
    measure(make_context(options.seed, 1024, *shape), 1)
    measured = measure(make_context(options.seed, tokens, *shape), options.chunks)
    bars = make_bars(measured)
    make_console().print(make_table(measured, bars, tokens))
    return {
        "schema_version": SCHEMA_VERSION,
        "started_at": started,
        "environment": environment,
        "settings": {
            "context_tokens": tokens,
            "chunks": options.chunks,
            "kept": KEPT,
            "kv_heads": options.kv_heads,
            "query_heads_per_kv_head": GROUP,
            "head_dim": DIM,
            "dtype": "float32",
            "threads": torch.get_num_threads(),
        },
        "measured": measured,
        "bars": bars,
    }


def measure(context: Context, chunks: int) -> dict[str, Any]:
    """Seconds of every chunk's attention, and of choosing after each."""
    compactor, keepkv = Compactor(), KeepKV()
    prefill, selection, merging = [], [], []
    bounds = [round(context.tokens * at / chunks) for at in range(chunks + 1)]
    for begin, end in pairwise(bounds):
        prefill.append(seconds(lambda rows=slice(begin, end): attend_chunk(context, rows)))
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
    """Some of the context's tokens over all of it before them, and over themselves.

    What would join the two is left out, so that attention is a little faster here than it is.
    """
    attend(context.q[rows], context.k[rows], context.v[rows], causal=True)
    if rows.start > 0:
        attend(context.q[rows], context.k[: rows.start], context.v[: rows.start], causal=False)


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def make_bars(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Shares of the attention's time: medians of choosing over the sum of all chunks."""
    prefill = sum(measured["prefill_chunks_s"])
    taken = {name: statistics.median(measured[f"{name}_s"]) for name in ("selection", "merge")}
    taken["selection + merge"] = sum(taken.values())
    return [
        {
            "bar": f"{name} / prefill attention",
            "value": round(value / prefill, 4),
            "met": value <= MOST_CHOOSING * prefill,
        }
        for name, value in taken.items()
    ]


def make_table(measured: dict[str, Any], bars: list[dict[str, Any]], tokens: int) -> Table:
    """Everything that was measured, a line each."""
    prefill = sum(measured["prefill_chunks_s"])
    table = Table(title=f"{format_size(tokens)} tokens, on {torch.get_num_threads()} threads")
    for column in ("what", "seconds", "of attention"):
        table.add_column(column, justify="left" if column == "what" else "right")
    table.add_row("prefill attention", f"{prefill:.1f}", "")
    for name, taken in measured["parts_s"].items():
        table.add_row(f"  {name}", f"{taken:.2f}", f"{taken / prefill:.2%}")
    for bar in bars:
        met = "met" if bar["met"] else "NOT MET"
        table.add_row(bar["bar"], f"{bar['value'] * prefill:.2f}", f"{bar['value']:.2%}, {met}")
    return table


if __name__ == "__main__":
    sys.exit(main())

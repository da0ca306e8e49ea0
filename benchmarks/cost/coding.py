"""The cost of coding the kept entries of a turn beside moving them, on this CPU.

    python -m benchmarks.cost.coding

The quarter that one layer of Llama-3.1-8B's shape keeps of a context, bfloat16, in pages of a pool:

    move      each entry to its page, as where nothing is coded
    round     each entry into a coded page, each number by itself
    encode    the same with the errors of keys fed back, as at a turn's end
    decode    coded pages back to numbers, as for a cut

They take turns. GB/s are of the entries in 16 bits, and launches are PyTorch's operations, each a
kernel on a GPU.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.llama import DIM, KV_HEADS
from benchmarks.common.table import new_table, show
from benchmarks.common.timing import seconds
from kvtier.retention.shares.base import CODED_PAGES, PAGE
from kvtier.sizes import format_size
from kvtier_kernels.codes import feedback
from kvtier_sglang.pool.packed import Cells, PackedSpan, PackedSpans

SHARE = 0.25


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that compute something; views do not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def declare(arguments: Arguments) -> None:
    arguments.size("--len", "64k", "context tokens", least=4096)
    arguments.whole("--rounds", 5, "that count, and one to warm up")


def run(options: Options) -> Measured:
    """Code and decode what a layer keeps, at all numbers of bits."""
    figures = {name: measure(int(name[3:]), options) for name in CODED_PAGES}
    title = f"{format_size(options.len)} tokens, {torch.get_num_threads()} threads"
    table = new_table(title, ("codes", "move", "round", "encode", "decode", "launches"))
    for name, found in figures.items():
        speeds = (f"{speed:.2f} GB/s" for speed in found["gb_per_s"].values())
        launches = found["launches"]
        table.add_row(name, *speeds, f"{launches['encode']} and {launches['decode']}")
    show(table)
    settings = {
        "context_tokens": options.len,
        "share": SHARE,
        "kv_heads": KV_HEADS,
        "head_dim": DIM,
        "dtype": "bfloat16",
        "threads": torch.get_num_threads(),
    }
    return Measured({"settings": settings, "codes": figures})


def measure(bits: int, options: Options) -> dict[str, Any]:
    """Seconds of each round, GB/s of the median, launches of one call, and pages' bytes."""
    calls, kept_bytes, coded_bytes = make_calls(bits, options.len, options.seed)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(options.rounds + 1):
        for name, call in calls.items():
            one = seconds(call)
            if turn > 0:
                taken[name].append(one)
    launches = {}
    for name, call in calls.items():
        with Launches() as counted:
            call()
        launches[name] = counted.count
    speeds = {name: kept_bytes / statistics.median(one) / 1e9 for name, one in taken.items()}
    return {
        "seconds": taken,
        "gb_per_s": speeds,
        "launches": launches,
        "bytes_ratio": kept_bytes / coded_bytes,
    }


def make_calls(bits: int, tokens: int, seed: int) -> tuple[dict[str, Callable[[], Any]], int, int]:
    """Return the calls that are timed, the bytes of the entries, and those of their coded pages."""
    generator = torch.Generator().manual_seed(seed)
    slots, kept = 2 * tokens + PAGE, int(SHARE * tokens) // PAGE * PAGE
    k, v = (torch.randn(KV_HEADS * slots, DIM, generator=generator).bfloat16() for _ in "kv")
    spans = PackedSpans(slots, Cells(k, v, slots), bits=bits)
    assert spans.coded is not None, "codes were asked for"
    chosen = [
        torch.randperm(tokens, generator=generator)[:kept].sort().values + head * slots
        for head in range(KV_HEADS)
    ]
    source, counts = torch.cat(chosen), [kept] * KV_HEADS
    coded_slots = PAGE * -(-kept // spans.coded.entries)
    plain = place(spans, tokens, kept, counts, coded=False)
    coded = place(spans, tokens, coded_slots, counts, coded=True)
    queries = torch.randn(KV_HEADS, 2 * DIM, DIM, generator=generator)
    fed_back = feedback(queries.transpose(1, 2) @ queries)

    def encode(by: torch.Tensor | None) -> None:
        spans.feedback = by
        spans.code(coded, lambda numbers: spans.cells.at(source[numbers]))

    calls = {
        "move": lambda: spans.cells.move(source, plain.cells),
        "round": lambda: encode(None),
        "encode": lambda: encode(fed_back),
        "decode": lambda: spans.decoded(coded),
    }
    entry_bytes = 2 * DIM * 2 * KV_HEADS
    return calls, kept * entry_bytes, coded_slots * entry_bytes


def place(
    spans: PackedSpans, begin: int, slots: int, counts: list[int], *, coded: bool
) -> PackedSpan:
    """A span of so many slots behind the context."""
    first = -(-begin // PAGE) * PAGE
    where = torch.arange(first, first + slots)
    return spans.span(where, counts, coded=spans.coded if coded else None)


BENCHMARK = Benchmark(
    "cost.coding",
    __doc__,
    declare,
    run,
    out=RESULTS / "coding.json",
    seeded="of the context",
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())

"""The gain from leaving entries out over masking them: one decoding step, on this CPU.

    pip install --no-deps --target benchmarks/peers/kernels kvpress==0.5.5 python -m
    benchmarks.cost.masked

A context of Llama-3.1-8B's shape, float32, one layer. A quarter of its KV heads keep all of it, the
others sinks and recent tokens:

    full            torch's attention over everything, nothing dropped
    full, kvtier    the same by the backend `reference`, as it serves on a CPU
    masked          kvpress: keys of dropped entries are overwritten, torch attends to everything
    kvtier          the backend `reference` over lists of what is kept

They take turns. Masked attention and kvtier's have to agree; full attention sees more.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.common.bars import at_most
from benchmarks.common.benchmark import RESULTS, ROOT, Arguments, Benchmark, Measured, Options
from benchmarks.common.lists import make_contexts
from benchmarks.common.llama import DIM, GROUP, KV_HEADS, LOCALITY_ENTRIES, SCALE
from benchmarks.common.peer_kernels import (
    KVPRESS_FILE,
    Kvpress,
    load_peer,
    to_masked,
)
from benchmarks.common.table import new_table, show
from benchmarks.common.timing import seconds
from kvtier.errors import UsageError
from kvtier.sizes import format_size
from kvtier_kernels import get_kernels

PEERS = ROOT / "benchmarks" / "peers" / "kernels"
MOST_DIFFERENCE = 1e-4


def declare(arguments: Arguments) -> None:
    arguments.add(
        "--peers", type=Path, default=PEERS, metavar="DIR", help="with kvpress (%(default)s)"
    )
    arguments.size("--len", "128k", "context tokens", least=LOCALITY_ENTRIES)
    arguments.whole("--ca-heads", KV_HEADS // 4, f"of {KV_HEADS}", most=KV_HEADS - 1)
    arguments.whole("--rounds", 9, "that count, and one to warm up")


def run(options: Options) -> Measured:
    """Take one step by each kind of attention, in turns."""
    try:
        peer = Kvpress(load_peer(options.peers, KVPRESS_FILE))
    except FileNotFoundError as error:
        expected = f"a folder with {KVPRESS_FILE}; benchmarks/peers/README.md says how to make one"
        raise UsageError("--peers", expected, str(options.peers)) from error
    calls = make_calls(peer, options.len, options.ca_heads, options.seed)
    difference = float((calls["masked"]() - calls["kvtier"]()).abs().max())
    taken = in_turns(calls, options.rounds)
    medians = {name: statistics.median(rounds) for name, rounds in taken.items()}
    show(make_table(taken, options.len, options.ca_heads))
    figures = {
        "peer": kvpress_version(options.peers),
        "settings": {
            "context_tokens": options.len,
            "kv_heads": KV_HEADS,
            "ca_heads": options.ca_heads,
            "locality_entries": LOCALITY_ENTRIES,
            "query_heads_per_kv_head": GROUP,
            "head_dim": DIM,
            "dtype": "float32",
            "threads": torch.get_num_threads(),
        },
        "step_s": taken,
        "ratios": {name: medians[name] / medians["kvtier"] for name in medians if name != "kvtier"},
    }
    bar = at_most("masked to kvtier, largest difference", difference, MOST_DIFFERENCE)
    return Measured(figures, [bar])


def make_calls(
    peer: Kvpress, tokens: int, ca_heads: int, seed: int
) -> dict[str, Callable[[], torch.Tensor]]:
    """A step of one layer by each, `[1, heads, group, dim]`."""
    kernels = get_kernels("reference")
    make = partial(make_contexts, layers=1, dim=DIM, dtype=torch.float32, device="cpu", seed=seed)
    of_heads = [tokens] * ca_heads + [LOCALITY_ENTRIES] * (KV_HEADS - ca_heads)
    kept, whole = make([of_heads], [0]), make([[0] * KV_HEADS], [tokens])
    plans = [one.planned_by(kernels) for one in (kept, whole)]
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, KV_HEADS, GROUP, DIM, generator=generator)
    masked = to_masked(kept, tokens)
    # Masking overwrites its own.
    keys = masked.k.clone()

    def full() -> torch.Tensor:
        found = torch.nn.functional.scaled_dot_product_attention(
            q.flatten(1, 2).unsqueeze(2), keys, masked.v, scale=SCALE, enable_gqa=True
        )
        return found.view(q.shape)

    return {
        "full": full,
        "full, kvtier": lambda: kernels.lists.decode(q, whole.kv, plans[1], 0, SCALE).o,
        "masked": lambda: peer.decode(q, masked, SCALE),
        "kvtier": lambda: kernels.lists.decode(q, kept.kv, plans[0], 0, SCALE).o,
    }


def in_turns(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every call by name; the first round warms up and is left out."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            one = seconds(call)
            if turn > 0:
                taken[name].append(one)
    return taken


def kvpress_version(peers: Path) -> str | None:
    found = (one.version for one in distributions(name="kvpress", path=[str(peers)]))
    return next(found, None)


def make_table(taken: Mapping[str, list[float]], tokens: int, ca_heads: int) -> Table:
    """A line each."""
    title = f"A step over {format_size(tokens)} tokens, {ca_heads} of {KV_HEADS} heads"
    table = new_table(title, ("attention", "median", "range", "over kvtier's"))
    ours = statistics.median(taken["kvtier"])
    for name, rounds in taken.items():
        median = statistics.median(rounds)
        spread = f"{min(rounds) * 1e3:.1f} … {max(rounds) * 1e3:.1f} ms"
        table.add_row(name, f"{median * 1e3:.1f} ms", spread, f"{median / ours:.2f}x")
    return table


BENCHMARK = Benchmark(
    "cost.masked", __doc__, declare, run, out=RESULTS / "masked.json", seeded="of the context"
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())

"""The tile and the cut of the work that suit decoding on this GPU: a table to set the defaults
from.

    PYTHONPATH=.:kernels python -m benchmarks.gpu.sweep --out out/gpu-sweep.json

The defaults are in `kvtier_kernels/triton_backend/`: the tile in attention/tiles.py, the cut in
planning/lists.py.
Each row is the median time of one layer's decode of `benchmarks.gpu.check`'s shapes, replayed as a
CUDA graph, as a share of what this GPU's read bandwidth allows (higher = better). Tiles come
first, under the default cut; then cuts, with the best tile by the geometric mean over shapes.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.common.benchmark import Arguments, Benchmark, Measured, Options
from benchmarks.common.lists import Contexts
from benchmarks.common.llama import SCALE
from benchmarks.gpu.bandwidth import read_bandwidth
from benchmarks.gpu.contexts import Shape, full, layer_seconds, queries, retained
from kvtier_kernels.triton_backend.attention import by_lists
from kvtier_kernels.triton_backend.attention.tiles import ListTile
from kvtier_kernels.triton_backend.kernels import TritonKernels
from kvtier_kernels.triton_backend.planning import lists

SWEPT = tuple(Shape(batch, heads) for batch, heads in ((1, 2), (4, 2), (16, 2), (64, 2), (16, 4)))
# The sizes of a tile; the last is how many programs a multiprocessor is meant to hold.
ENTRIES, WARPS, STAGES, PROGRAMS = (32, 64, 128), (2, 4, 8), (2, 3, 4), (1, 2, 3, 4)
LEAST_PAGES = (1, 2, 4, 8, 16, 32)
# A group's queries.
ROWS = 16


@contextmanager
def tiled(tile: Sequence[int]) -> Iterator[None]:
    """Lists are attended to by such a tile, whatever would be chosen."""
    with patch.object(by_lists, "list_tile", lambda *_, **__: ListTile(ROWS, *tile)):
        yield


@contextmanager
def cut(least_pages: int) -> Iterator[None]:
    """Plans that are made inside give a program at least so many pages."""
    with patch.object(lists, "LEAST_PAGES", least_pages):
        yield


Held = dict[Shape, Contexts]


def measured(held: Held, ceiling: float) -> dict[str, float]:
    """Share of the ceiling by shape."""
    kernels = TritonKernels()
    return {
        str(shape): contexts.num_bytes / layer_seconds(kernels, contexts) / ceiling
        for shape, contexts in held.items()
    }


def mean_of(shares: dict[str, float]) -> float:
    return math.exp(sum(map(math.log, shares.values())) / len(shares))


def sweep(seed: int, *, voted: bool, uncompressed: bool) -> dict[str, Any]:
    """Rows by tile, then by cut."""
    ceiling = read_bandwidth()
    held: Held = {}
    for shape in SWEPT:
        lengths = shape.lengths(seed)
        held[shape] = (
            full(lengths, seed) if uncompressed else retained(shape, lengths, seed, voted=voted)
        )
    device = torch.cuda.get_device_name()
    document = {"device": device, "read_bytes_per_s": ceiling, "voted": voted, "full": uncompressed}
    choices = list(itertools.product(ENTRIES, WARPS, STAGES, PROGRAMS))
    compile_all(choices, voted=voted)
    measure = partial(measured, held, ceiling)
    tiles, cuts = [], []
    for tile in choices:
        with tiled(tile):
            tiles += _rows(tile, measure)
    best = max(tiles, key=lambda row: row["mean"])["setting"]
    for least in LEAST_PAGES:
        with tiled(best), cut(least):
            cuts += _rows([least], measure)
    return document | {"tiles": tiles, "cuts": cuts}


def compile_all(tiles: Sequence[Sequence[int]], *, voted: bool) -> None:
    """Fill Triton's cache from all cores, as compiling takes longer than measuring."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=context) as pool:
        for tile in tiles:
            pool.submit(_compile, tile, voted)


def _compile(tile: Sequence[int], voted: bool) -> None:
    kernels, shape = TritonKernels(), Shape(1, 2)
    contexts = retained(shape, [2048], 0, voted=voted)
    with tiled(tile):
        kernels.lists.decode(queries(1), contexts.kv, contexts.planned_by(kernels), 0, SCALE)


def _rows(setting: Sequence[int], measure: Callable[[], dict[str, float]]) -> list[dict[str, Any]]:
    """One, or none where the setting does not run."""
    try:
        shares = measure()
    except Exception as error:
        # A tile that does not fit the shared memory.
        print(f"{setting}: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return []
    print(setting, " ".join(f"{share:.3f}" for share in shares.values()), flush=True)
    return [{"setting": list(setting), "mean": mean_of(shares), "shares": shares}]


def declare(arguments: Arguments) -> None:
    arguments.add("--voted", action="store_true", help="entries with votes")
    arguments.add("--full", action="store_true", help="nothing is compressed")


def run(options: Options) -> Measured:
    """Sweep, and print the ten best of either kind."""
    figures = sweep(options.seed, voted=options.voted, uncompressed=options.full)
    for part, names in (("tiles", "entries, warps, stages, programs"), ("cuts", "pages")):
        print(f"best {part} ({names}):")
        for row in sorted(figures[part], key=lambda row: -row["mean"])[:10]:
            print(f"  {row['setting']}  {row['mean']:.3f}")
    return Measured(figures)


BENCHMARK = Benchmark("gpu.sweep", __doc__, declare, run, seeded="of KV and queries", gpu=True)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())

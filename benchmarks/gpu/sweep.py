"""Which tile and which cut of the work suit decoding on this GPU: a table to set the defaults from.

    PYTHONPATH=.:kernels python -m benchmarks.gpu.sweep --out out/gpu-sweep.json

The defaults are in `kvtier_kernels/triton_backend/`: the tile in attention/tiles.py and
attention/by_slots.py, the cut in planning/plans.py.
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

import torch

from benchmarks.common.benchmark import Arguments, Benchmark, Measured, Options
from benchmarks.common.llama import KV_HEADS, SCALE
from benchmarks.gpu.bandwidth import read_bandwidth
from benchmarks.gpu.head_classes import (
    RUN,
    HeadClass,
    Shape,
    both_classes,
    layer_seconds,
    make_class,
    queries,
)
from kvtier_kernels.triton_backend.attention.decode import decode_units
from kvtier_kernels.triton_backend.kernels import TritonKernels
from kvtier_kernels.triton_backend.launching import launch
from kvtier_kernels.triton_backend.planning import plans

SWEPT = tuple(Shape(batch, heads) for batch, heads in ((1, 2), (4, 2), (16, 2), (64, 2), (16, 4)))
ENTRIES, WARPS, STAGES = (16, 32, 64, 128), (1, 2, 4, 8), (2, 3, 4)
UNITS_PER_SM, LEAST_STRETCH = (2, 3, 4, 6, 8, 12, 16), (64, 128, 256, 512)


def kernels_with(entries: int, warps: int, stages: int) -> TritonKernels:
    """Decoding by another tile."""
    tile = {"BLOCK_N": entries, "num_warps": warps, "num_stages": stages}

    def tuned(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        launch(kernel, grid, *args, **options | (tile if kernel is decode_units else {}))

    return TritonKernels(tuned)


@contextmanager
def cut(units_per_sm: int, least_stretch: int) -> Iterator[None]:
    """Plans that are made inside cut the work so."""
    before = plans.UNITS_PER_SM, plans.LEAST_STRETCH
    plans.UNITS_PER_SM, plans.LEAST_STRETCH = units_per_sm, least_stretch
    try:
        yield
    finally:
        plans.UNITS_PER_SM, plans.LEAST_STRETCH = before


Held = dict[Shape, list[HeadClass]]


def measured(kernels: TritonKernels, held: Held, ceiling: float) -> dict[str, float]:
    """Share of the ceiling by shape."""
    found = {}
    for shape, classes in held.items():
        planned = [one.planned_by(kernels) for one in classes]
        taken = layer_seconds(kernels, planned, shape.batch)
        found[str(shape)] = sum(one.num_bytes for one in classes) / taken / ceiling
    return found


def mean_of(shares: dict[str, float]) -> float:
    return math.exp(sum(map(math.log, shares.values())) / len(shares))


def sweep(seed: int, *, voted: bool, full: bool) -> dict[str, Any]:
    """Rows by tile, then by cut."""
    ceiling = read_bandwidth()
    usual = TritonKernels()
    held: Held = {}
    for shape in SWEPT:
        if full:
            held[shape] = [make_class(usual, shape.lengths(seed), KV_HEADS, seed, voted=voted)]
        else:
            held[shape] = both_classes(usual, shape, seed, voted=voted)
    device = torch.cuda.get_device_name()
    document = {"device": device, "read_bytes_per_s": ceiling, "voted": voted, "full": full}
    choices = list(itertools.product(ENTRIES, WARPS, STAGES))
    heads = {one.heads for classes in held.values() for one in classes}
    compile_all(choices, sorted(heads), voted=voted)
    rows = (_row(tile, partial(measured, kernels_with(*tile), held, ceiling)) for tile in choices)
    tiles = [row for row in rows if row]
    best = max(tiles, key=lambda row: row["mean"])["setting"]
    kernels, cuts = kernels_with(*best), []
    for setting in itertools.product(UNITS_PER_SM, LEAST_STRETCH):
        with cut(*setting):
            cuts.append(_row(setting, partial(measured, kernels, held, ceiling)))
    return document | {"tiles": tiles, "cuts": [row for row in cuts if row]}


def compile_all(tiles: Sequence[Sequence[int]], heads: Sequence[int], *, voted: bool) -> None:
    """Fill Triton's cache from all cores, as compiling takes longer than measuring."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=context) as pool:
        for tile in tiles:
            pool.submit(_compile, tile, heads, voted)


def _compile(tile: Sequence[int], heads: Sequence[int], voted: bool) -> None:
    kernels = kernels_with(*tile)
    for count in heads:
        one = make_class(kernels, [RUN * 4], count, 0, voted=voted, layers=1)
        kernels.decode(queries(1, count), one.layers[0], one.plan, SCALE)


def _row(setting: Sequence[int], measure: Callable[[], dict[str, float]]) -> dict[str, Any] | None:
    try:
        shares = measure()
    except Exception as error:
        # A tile that does not fit the shared memory.
        print(f"{setting}: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return None
    print(setting, " ".join(f"{share:.3f}" for share in shares.values()), flush=True)
    return {"setting": list(setting), "mean": mean_of(shares), "shares": shares}


def declare(arguments: Arguments) -> None:
    arguments.add("--voted", action="store_true", help="entries with votes")
    arguments.add("--full", action="store_true", help="one class of all heads")


def run(options: Options) -> Measured:
    """Sweep, and print the ten best of either kind."""
    figures = sweep(options.seed, voted=options.voted, full=options.full)
    for part, names in (("tiles", "entries, warps, stages"), ("cuts", "units/SM, stretch")):
        print(f"best {part} ({names}):")
        for row in sorted(figures[part], key=lambda row: -row["mean"])[:10]:
            print(f"  {row['setting']}  {row['mean']:.3f}")
    return Measured(figures)


BENCHMARK = Benchmark("gpu.sweep", __doc__, declare, run, seeded="of KV and queries", gpu=True)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())

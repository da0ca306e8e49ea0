"""The check of the kernels on this GPU, in one command: are they right, and how near to its memory?

    make gpu-check
    PYTHONPATH=.:kernels python -m benchmarks.gpu.check     with torch and triton alone

Meant for less than ten minutes, without a network. Attention of Llama-3.1-8B's shape (32 query
heads, 8 KV heads, dim 128, bfloat16), one layer's KV at a time:

    tests     the equivalence suite on this device, where pytest and hypothesis are installed
    equal     Triton against the reference, and graphs against eager calls
    decode    batches of 1 to 64 contexts of 8k to 128k, of which 25% and 50% of the KV heads keep
              all: the share of this GPU's own read bandwidth, and the time against full KV
    planning  what planning a decoding step costs the host
    choosing  Compactor's selection and KeepKV's merge for all 32 layers of 128k, against that
              context's prefill attention

With --flashinfer (`make gpu-check FLASHINFER=1`) full KV is decoded by FlashInfer, which wants nvcc
and compiles for minutes the first time. With --peers DIR (`PEERS=DIR`) the same decodes by others'
kernels, which `benchmarks/gpu/check/peer_kernels.py` says how to bring there.

What serving gains is another command, `benchmarks.gpu.serving`.

Full KV is FlashInfer's decode with --flashinfer, else our own over dense tokens, and the JSON says
which. Times are medians; a decode is replayed as a CUDA graph over enough layers' KV that no cache
holds it.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.benchmark import Arguments, Benchmark, Measured, Options
from benchmarks.gpu.bandwidth import read_bandwidth
from benchmarks.gpu.check.choosing import measure_choosing
from benchmarks.gpu.check.claims import lines, make_bars
from benchmarks.gpu.check.decode import measure_decode, measure_planning
from benchmarks.gpu.check.equal import check_equal
from benchmarks.gpu.check.peers import measure_peers
from benchmarks.gpu.check.processes import run_tests
from benchmarks.gpu.contexts import SHAPES
from kvtier.environment import versions
from kvtier.errors import UsageError

# In the order in which they run.
PARTS: Mapping[str, Callable[[Options], Any]] = {
    "equal": lambda asked: check_equal(SHAPES, asked.seed),
    "read_bytes_per_s": lambda _: read_bandwidth(),
    "decode": lambda asked: [
        measure_decode(shape, asked.seed, flashinfer=asked.flashinfer) for shape in SHAPES
    ],
    "planning": lambda _: measure_planning(),
    "choosing": lambda asked: measure_choosing(asked.seed),
    "peers": lambda asked: measure_peers(SHAPES, asked.seed, asked.peers),
    "tests": lambda _: run_tests(),
}


def declare(arguments: Arguments) -> None:
    add = arguments.add
    add("--flashinfer", action="store_true", help="decode full KV by FlashInfer")
    add("--peers", type=Path, default=None, metavar="DIR", help="others' kernels")
    add("--parts", nargs="+", choices=PARTS, help="(all)")
    arguments.check(has_what_its_parts_want)


def leaves_out(options: Options, part: str) -> bool:
    """Return whether a part wants a flag that was not given."""
    return part == "peers" and options.peers is None


def has_what_its_parts_want(options: Options) -> None:
    """Raises UsageError where a part is asked for without its flag."""
    for name in options.parts or ():
        if leaves_out(options, name):
            raise UsageError("--parts", f"--{name} beside the part {name}", "no such flag")


def run(options: Options) -> Iterator[Measured]:
    """All parts or those asked for; what was measured so far comes after each of them."""
    began = time.perf_counter()
    torch.manual_seed(options.seed)
    figures: dict[str, Any] = {"failures": {}}
    for name in PARTS:
        if leaves_out(options, name) or name not in (options.parts or PARTS):
            continue
        print(f"{time.perf_counter() - began:6.1f} s  {name}", file=sys.stderr, flush=True)
        run_part(name, options, figures)
        yield Measured(figures, make_bars(figures))
    print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, {versions()}")
    for line in lines(figures):
        print(line)


def run_part(name: str, options: Options, figures: dict[str, Any]) -> None:
    """One part into `figures`; where it fails, it is named in the `failures` there."""
    try:
        figures[name] = PARTS[name](options)
        # A kernel's error is raised here, not in the next part.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:
        # One part must not cost the others: a GPU may be there for minutes only. After some faults
        # no other kernel runs in this process, but tests have their own.
        traceback.print_exc()
        figures["failures"][name] = f"{type(error).__name__}: {error}"
        with suppress(Exception):
            torch.cuda.empty_cache()


BENCHMARK = Benchmark("gpu.check", __doc__, declare, run, gpu=True)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())

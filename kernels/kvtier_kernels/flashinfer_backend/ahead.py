"""Compile the attention with votes for a GPU that is not there.

    python -m kvtier_kernels.flashinfer_backend.ahead [--arch 9.0a] [--kv TYPE] [--all | --file F]

FlashInfer's own generator writes the module and names the commands; those are run for the kernels
that the backend calls and for the host code that takes the variant's tensors, with --all for every
file, with --file for one. Prints the most registers and spilled bytes of a file's kernels. Wants
nvcc and the headers of a CUDA toolkit (CUDA_HOME), and minutes.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from kvtier_kernels.base import KernelUnavailableError
from kvtier_kernels.flashinfer_backend.machine import check_compiler
from kvtier_kernels.flashinfer_backend.variant import jit_args
from kvtier_kernels.fp8 import FP8_DTYPES
from kvtier_kernels.triton_backend.ahead import resources

HOPPER = "9.0a"
# Decoding and a prefix run the kernels without a mask, over pages. The module needs the others.
CALLED = (
    "batch_prefill_paged_kernel_mask_0.cu",
    "batch_prefill_ragged_kernel_mask_0.cu",
    "batch_prefill.cu",
    "batch_prefill_jit_binding.cu",
)
# Query type, KV type, head dimension.
VARIANTS = tuple((torch.bfloat16, kv, 128) for kv in (torch.bfloat16, *FP8_DTYPES))


class Compiled(NamedTuple):
    """One source file. kernels: registers and spilled bytes of each."""

    module: str
    file: str
    wall_s: float
    kernels: tuple[tuple[int, int], ...]


def compile_variant(
    q_dtype: torch.dtype, kv_dtype: torch.dtype, dim: int, files: Sequence[str] | None = CALLED
) -> Iterator[Compiled]:
    """files: by their names, None for all.

    Raises CalledProcessError, with what nvcc said, for a file that does not compile.
    """
    from flashinfer.jit.attention import gen_customize_batch_prefill_module

    arguments = jit_args(q_dtype, kv_dtype, dim)
    spec = gen_customize_batch_prefill_module("fa2", *arguments)
    for entry in spec.get_compile_commands():
        source = Path(entry["file"])
        if files is not None and source.name not in files:
            continue
        Path(entry["directory"]).mkdir(parents=True, exist_ok=True)
        command = shlex.split(entry["command"])
        began = time.perf_counter()
        subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True, check=True)
        wall_s = time.perf_counter() - began
        found = tuple(resources(Path(command[command.index("-o") + 1])))
        yield Compiled(arguments[0], source.name, wall_s, found)


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0 when everything compiles, 1 when something does not, 2 without a compiler."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", default=HOPPER, help=f"compute capability, default {HOPPER}")
    types = [str(variant[1]).removeprefix("torch.") for variant in VARIANTS]
    parser.add_argument("--kv", choices=types, help="only the variant with this type of KV")
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--all", action="store_true", help="all files of the module")
    files.add_argument("--file", choices=CALLED, help="only this one")
    options = parser.parse_args(argv)
    wanted = None if options.all else [options.file] if options.file else CALLED
    # FlashInfer reads it when it is imported, and would ask the GPU otherwise.
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = options.arch
    try:
        check_compiler()
    except (ImportError, KernelUnavailableError) as error:
        print(f"kvtier_kernels.flashinfer_backend.ahead: error: {error}", file=sys.stderr)
        return 2
    for variant, kv_type in zip(VARIANTS, types, strict=True):
        if options.kv not in (None, kv_type):
            continue
        try:
            for one in compile_variant(*variant, wanted):
                _report(one)
        except subprocess.CalledProcessError as error:
            print(error.stderr, file=sys.stderr)
            return 1
    return 0


def _report(one: Compiled) -> None:
    used = "host code"
    if one.kernels:
        registers, spilled = (max(each) for each in zip(*one.kernels, strict=True))
        used = f"{len(one.kernels)} kernels, at most {registers} registers, {spilled} B spilled"
    print(f"{one.module:45} {one.file:40} {one.wall_s:6.1f} s  {used}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

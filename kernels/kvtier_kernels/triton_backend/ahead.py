"""Compile the kernels for a GPU that is not there: what does not compile or spills shows here.

    python -m kvtier_kernels.triton_backend.ahead [CAPABILITY]      e.g. 90 for Hopper

Prints the registers, spilled bytes and shared memory of every variant, as `cuobjdump` reads them.
Wants the CUDA tools that Triton's Linux wheels bring, and no TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from kvtier_kernels.base import AttentionState, RaggedKV
from kvtier_kernels.codes import PLANES
from kvtier_kernels.fp8 import FP8_DTYPES
from kvtier_kernels.lists import CellKV, ListKernels, ListTables
from kvtier_kernels.memory.base import PLACE_WIDTH, MemoryKernels, MemoryLayer
from kvtier_kernels.selection import SelectionKernels, Stretch
from kvtier_kernels.triton_backend.kernels import TritonKernels
from kvtier_kernels.triton_backend.launching import FIRST_WITH_E4M3, Launch, is_interpreted

HOPPER = 90
# Shapes of models in float32, such as the demo model: head dimension and GQA group.
FLOAT32_SHAPES = ((32, 2), (64, 4))
# Numbers of a query that memories are looked up by.
RANKS = (16, 64)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
LOOPS = (
    "extend_blocks",
    "deal_pages",
    "attend_stretch",
    "attend_codes",
    "merge_lists",
    "window_rows",
    "window_columns",
    "nearest_home",
    "segment_softmax",
    "segment_sum",
    "mean_of_queries",
    "sum_over_keys",
    "nearest_entry",
    "answer_token",
)


class Compiled(NamedTuple):
    """One variant. spilled_bytes: of local memory per thread, 0 where registers suffice."""

    kernel: str
    variant: str
    registers: int
    spilled_bytes: int
    shared_bytes: int  # per block


class AbsentDevice:
    """A stand-in for a Triton driver, with as much of it as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(capability: int = HOPPER) -> Iterator[Compiled]:
    """Every variant that serving uses. Raises what Triton raises for one that does not compile."""
    if is_interpreted():
        raise RuntimeError("TRITON_INTERPRET is set: nothing is compiled")
    triton.runtime.driver.set_active(AbsentDevice(capability))
    for dim, group, kv_dtype, votes in itertools.product(
        (64, 128, 256), (1, 4, 8), (torch.bfloat16, *FP8_DTYPES), (0, 1, 2)
    ):
        if (dim, group) != (128, 4) and (votes == 2 or kv_dtype != torch.bfloat16):
            continue
        if kv_dtype == torch.float8_e4m3fn and capability < FIRST_WITH_E4M3:
            continue
        name = f"dim {dim}, group {group}, {str(kv_dtype).removeprefix('torch.')}, votes {votes}"
        found: list[Compiled] = []
        _use(_compiler(found, name), dim, group, kv_dtype, votes)
        yield from found
    for (dim, group), votes in itertools.product(FLOAT32_SHAPES, (0, 1)):
        found = []
        name = f"dim {dim}, group {group}, float32, votes {votes}"
        _use(_compiler(found, name), dim, group, torch.float32, votes, torch.float32)
        yield from found
    for dim, rank, dtype in itertools.product((64, 128), RANKS, (torch.bfloat16, torch.float32)):
        found = []
        name = f"dim {dim}, group 4, {str(dtype).removeprefix('torch.')}, rank {rank}"
        _use_memory(TritonKernels(_compiler(found, name)).memory, dim, rank, dtype)
        yield from found


def _compiler(found: list[Compiled], variant: str) -> Launch:
    def compile_only(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        compiled = kernel.warmup(*args, grid=grid, **options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            ((registers, spilled),) = resources(Path(file.name))
        shared = compiled.metadata.shared
        found.append(Compiled(kernel.__name__, variant, registers, spilled, shared))

    return compile_only


def resources(compiled: Path) -> list[tuple[int, int]]:
    """Registers and spilled bytes of a thread of every kernel in an object file."""
    command = [str(CUOBJDUMP), "--dump-resource-usage", str(compiled)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [dict(re.findall(r"(REG|LOCAL|STACK):(\d+)", one)) for one in done.stdout.splitlines()]
    return [(int(one["REG"]), int(one["LOCAL"]) + int(one["STACK"])) for one in found if one]


def _use(
    launch: Launch,
    dim: int,
    group: int,
    kv_dtype: torch.dtype,
    votes: int,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Call everything once, over tensors whose content is nothing."""
    kernels = TritonKernels(launch)
    heads, requests, entries, new = 2, 4, 4096, 64
    cells = torch.empty(entries * heads, dim, dtype=kv_dtype)
    q = torch.empty(requests * new, heads, group, dim, dtype=dtype)
    q_indptr = tuple(range(0, requests * new + 1, new))
    shapes = {0: None, 1: (len(cells),), 2: (len(cells), group)}
    shape = shapes[votes]
    log_votes = None if shape is None else torch.zeros(shape)
    _use_lists(kernels.lists, q, CellKV(cells, cells, entries, log_votes), q_indptr)
    if votes:
        return
    if kv_dtype == dtype:
        for bits in PLANES:
            _use_lists(kernels.lists, q, CellKV(cells, cells, entries, bits=bits), q_indptr)
    own = q[:, :, 0].contiguous()
    k = cells.view(entries, heads, dim)
    kv = RaggedKV(k, k)
    slots = torch.arange(entries)
    plan = kernels.plan(slots, range(0, entries + 1, entries // requests))
    kernels.extend(q, own, own, q_indptr, kv, plan, 0.1)
    # One token over a long prefix, which is cut in splits.
    kernels.extend(q[:1], own[:1], own[:1], (0, 1), kv, kernels.plan(slots, (0, entries)), 0.1)
    kernels.store(own, own, kv, slots[: len(own)])
    state = AttentionState(q, torch.empty(q.shape[:-1]))
    kernels.merge_states(state, state)
    kernels.selection.window_mass(q, own, [Stretch(0, new, new)], 0.1)
    _use_merging(kernels.selection, own.transpose(0, 1), q)


def _use_lists(
    kernels: ListKernels, q: torch.Tensor, kv: CellKV, q_indptr: tuple[int, ...]
) -> None:
    """q `[tokens, heads, group, dim]`, of tokens to extend by."""
    layers, requests, heads = 2, len(q_indptr) - 1, q.shape[1]
    pages = torch.zeros(requests, layers * heads, dtype=torch.int32)
    tables = ListTables(pages.long(), pages, pages)
    plan = kernels.plan(tables, pages[:, 0], pages[:, 0], layers, heads)
    kernels.extend(q, q_indptr, kv, plan, 1, 0.1)
    # The rows are those of a draft of eight tokens, and of single tokens.
    draft = q.view(-1, 8, *q.shape[1:]).transpose(1, 2).flatten(2, 3)
    for rows in (draft, q):
        kernels.decode(rows[:requests], kv, plan, 1, 0.1)


def _use_merging(kernels: SelectionKernels, keys: torch.Tensor, q: torch.Tensor) -> None:
    """keys `[heads, tokens, dim]`, q `[w, heads, group, dim]`."""
    heads, tokens, _ = keys.shape
    group, count = q.shape[2], 16
    homes, lengths = keys[:, :count], torch.ones(heads, count)
    dropped = torch.arange(count, tokens).expand(heads, -1)
    target = torch.arange(tokens).remainder(count).expand(heads, -1).contiguous()
    kernels.find_homes(keys, dropped, homes, lengths, 0.5, target)
    bins = kernels.bins(target, count)
    logits = torch.zeros(heads, group, tokens)
    bins.log_softmax(logits)
    bins.mix(logits[:, 0], keys)
    kernels.predicted_logits(q, keys, 0.1, torch.zeros(heads, group, len(q)))
    kernels.window_lse(q, keys, 0.1)


def _use_memory(kernels: MemoryKernels, dim: int, rank: int, dtype: torch.dtype) -> None:
    memories, heads, group, tokens, entries, kept = 2, 2, 4, 64, 1024, 4096
    each = torch.ones(memories)
    states = torch.empty(entries, heads, group, dim, dtype=dtype)
    kv = torch.empty(kept, dim, dtype=dtype)
    layer = MemoryLayer(
        projection=torch.empty(memories, rank, heads, group, dim, dtype=dtype),
        keys=torch.empty(entries, rank + PLACE_WIDTH, dtype=dtype),
        key_indptr=torch.zeros(memories + 1, dtype=torch.int32),
        place_weight=each,
        nearness=each,
        prefix_tokens=each.int(),
        o=states,
        lse=torch.empty(states.shape[:-1]),
        looks_up=torch.ones(memories, heads, dtype=torch.bool),
        kept_k=kv,
        kept_v=kv,
        kept_indptr=torch.zeros(memories * heads + 1, dtype=torch.int32),
    )
    ids = torch.zeros(tokens, dtype=torch.int32)
    x = torch.empty(tokens, memories, rank)
    kernels.attend(states[:tokens], x, ids.long(), ids, layer, 0.1)


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0 when everything compiles and no loop spills, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("capability", type=int, nargs="?", default=HOPPER)
    spills = 0
    for one in compile_all(parser.parse_args(argv).capability):
        spills += one.spilled_bytes > 0 and one.kernel in LOOPS
        print(
            f"{one.kernel:15} {one.variant:40} {one.registers:4} registers "
            f"{one.spilled_bytes:5} B spilled {one.shared_bytes:7} B shared"
        )
    return min(spills, 1)


if __name__ == "__main__":
    sys.exit(main())

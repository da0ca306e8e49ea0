"""The bandwidth that this GPU's memory gives a kernel that does nothing but read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from benchmarks.gpu.timing import seconds


@triton.jit
def _read(x, sums, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * BLOCK * STEPS
    acc = tl.zeros([BLOCK], tl.int32)
    for step in range(STEPS):
        acc += tl.load(x + begin + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(acc, 0))


def read_bandwidth(num_bytes: int = 4 << 30) -> float:
    """Bytes per second that a kernel reads which does nothing else."""
    block, steps = 4096, 8
    programs = num_bytes // 4 // (block * steps)
    # The data are not zeros, which a memory might tell from data.
    x = torch.randint(1 << 30, (programs * block * steps,), dtype=torch.int32, device="cuda")
    sums = torch.empty(programs, dtype=torch.int32, device="cuda")
    return x.numel() * 4 / seconds(lambda: _read[(programs,)](x, sums, BLOCK=block, STEPS=steps))

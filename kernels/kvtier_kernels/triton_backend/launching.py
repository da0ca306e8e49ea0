"""The parts that all launchers of this backend share: the device, the start of a kernel on it, and
the buffers that attention states are written to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from kvtier_kernels.base import KernelUnavailableError
from kvtier_kernels.triton_backend.softmax import log_of

# The multiprocessors that are assumed without a GPU: as many as the smallest current one has.
INTERPRETED_SMS = 16

# Compute capability of Ada.
FIRST_WITH_E4M3 = 89

# Runs a kernel on a grid; its other arguments are the kernel's.
Launch = Callable[..., Any]


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    kernel[grid](*args, **options)


def check_device() -> None:
    """Raise KernelUnavailableError where no kernel could run."""
    if not (torch.cuda.is_available() or is_interpreted()):
        raise KernelUnavailableError(
            "kernels: 'triton' needs a CUDA device, and there is none (TRITON_INTERPRET=1 runs it "
            "on the CPU, for tests)"
        )


def is_interpreted() -> bool:
    """Return whether Triton was told, before it was imported, to run its kernels in Python."""
    return not isinstance(log_of, triton.JITFunction)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of the device's multiprocessors."""
    if device.type != "cuda":
        return INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def has_wide_products() -> bool:
    """Return whether matrix products take their tiles from shared memory, as on Hopper and
    data-centre Blackwell; elsewhere they go through registers, which others then lack."""
    if is_interpreted():
        return True
    return triton.runtime.driver.active.get_current_target().arch // 10 in (9, 10, 11)


def has_numbers_of(dtype: torch.dtype) -> bool:
    """Return whether kernels can be compiled for KV of that dtype: before Ada, Triton has no
    e4m3."""
    if dtype != torch.float8_e4m3fn or is_interpreted():
        return True
    return int(triton.runtime.driver.active.get_current_target().arch) >= FIRST_WITH_E4M3


def is_ieee(q: torch.Tensor) -> bool:
    """float32 is for comparing: tensor cores' TF32 would not do. Nor does the interpreter, which
    takes bfloat16 for integers, multiply anything else."""
    return q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and is_interpreted())


def dim_contiguous(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy, with its last dimension in one piece: what kernels take for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


def state_buffers(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """o of that shape, [..., dim], and lse."""
    o = torch.empty(shape, dtype=dtype, device=device)
    return o, torch.empty(shape[:-1], dtype=torch.float32, device=device)


def to_device(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """int32 there, without waiting for the device."""
    host = torch.tensor(values, dtype=torch.int32, device="cpu")
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host

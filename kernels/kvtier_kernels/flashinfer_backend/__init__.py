"""The backend `flashinfer`:

    kernels.py     the contract's face
    lists.py       lists of entries in pages as tables of cells
    variant.py     votes, as C++ that FlashInfer compiles into its attention
    wrappers.py    FlashInfer's wrappers, lent to plans
    limits.py      what is left to the Triton kernels

What it needs of the machine is checked here, before anything else is imported. Scales and
logarithms meet in variant.py and kernels.py only.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from kvtier_kernels.base import AttentionKernels, KernelUnavailableError

LEAST_CAPABILITY = (8, 0)


def make_kernels() -> AttentionKernels:
    """The backend. Raises KernelUnavailableError, or ImportError, for what this machine lacks.

    FlashInfer compiles kernels when they are first called; those with votes come in no package.
    """
    if not torch.cuda.is_available():
        raise _needs("a CUDA device, and there is none")
    # Asking would make this process one that holds memory of the device.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found = torch.cuda.get_device_capability()
        if found < LEAST_CAPABILITY:
            raise _needs(f"a CUDA device of capability 8.0 or more, got {found[0]}.{found[1]}")
    check_compiler()
    from kvtier_kernels.flashinfer_backend.kernels import FlashInferKernels

    return FlashInferKernels()


def check_compiler() -> None:
    """Raise KernelUnavailableError, or ImportError, where nothing can be compiled."""
    from flashinfer.jit.cpp_ext import get_cuda_path

    try:
        compiler = Path(get_cuda_path()) / "bin" / "nvcc"
    except RuntimeError as error:
        raise _needs(f"nvcc: {error}") from error
    if not compiler.exists():
        raise _needs(f"nvcc, and {compiler} is not there (CUDA_HOME names the toolkit)")
    if shutil.which("ninja") is None:
        raise _needs("ninja on the PATH, and there is none")


def _needs(what: str) -> KernelUnavailableError:
    return KernelUnavailableError(f"kernels: 'flashinfer' needs {what}")


__all__ = ["make_kernels"]

"""The backend `flashinfer`:

    machine.py     what it needs of the machine, asked before anything else is imported
    kernels.py     the contract's face
    lists.py       lists of entries in pages as tables of cells
    variant.py     votes, as C++ that FlashInfer compiles into its attention
    tables.py      page tables from slot tables, and its logarithms as ours
    wrappers.py    FlashInfer's wrappers, lent to plans
    limits.py      what is left to the Triton kernels
    ahead.py       compiles the variant for a GPU that is not there

Scales and logarithms meet in variant.py and tables.py only.
"""

from __future__ import annotations

from kvtier_kernels.base import AttentionKernels


def make_kernels() -> AttentionKernels:
    """The backend. Raises KernelUnavailableError, or ImportError, for what this machine lacks."""
    from kvtier_kernels.flashinfer_backend.machine import check_machine

    check_machine()
    from kvtier_kernels.flashinfer_backend.kernels import FlashInferKernels

    return FlashInferKernels()


__all__ = ["make_kernels"]

"""The backend `reference`, in PyTorch:

kernels.py     attention, the contract's face; slots.py cuts its slot tables in runs
memory.py      fixed prefixes
selection.py   what selecting and merging ask for -> homes.py
"""

from __future__ import annotations

from kvtier_kernels.base import AttentionKernels


def make_kernels() -> AttentionKernels:
    """The backend; it runs everywhere."""
    from kvtier_kernels.reference_backend.kernels import ReferenceKernels

    return ReferenceKernels()


__all__ = ["make_kernels"]

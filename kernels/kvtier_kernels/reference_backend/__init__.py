"""The backend `reference`, in PyTorch:

kernels.py     attention, the contract's face -> products.py; slots.py cuts slot tables in runs
lists.py       lists of entries in pages -> products.py
memory.py      fixed prefixes
selection.py   what selecting and merging ask for
"""

from __future__ import annotations

from kvtier_kernels.base import AttentionKernels


def make_kernels() -> AttentionKernels:
    """The backend; it runs everywhere."""
    from kvtier_kernels.reference_backend.kernels import ReferenceKernels

    return ReferenceKernels()


__all__ = ["make_kernels"]

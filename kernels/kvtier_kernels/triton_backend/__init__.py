"""The backend `triton`. Launchers check and prepare in Python, the kernels are compiled:

    launching.py   how any kernel is started, and what this device is
    kernels.py     the contract's face, attention and selection
    planning/      plans.py, lists.py                 -> deal.py
    attention/     by_slots.py, dense.py              -> extend.py, merge.py, store.py
                   by_lists.py                        -> lists.py
    selecting.py                                      -> selection/, merging/nearest.py
    merging/       bins.py                            -> segments.py
    memory/        attend.py                          -> lookup.py, answer.py
    softmax.py     what kernels compute of a tile; attention/entries.py loads its entries
    ahead.py       compiles all of it for a GPU that is not there

Run `ahead` after changing a kernel: it says whether its loops still keep to the registers.
"""

from __future__ import annotations

from kvtier_kernels.base import AttentionKernels


def make_kernels() -> AttentionKernels:
    """The backend. Raises KernelUnavailableError, or ImportError, for what this machine lacks."""
    from kvtier_kernels.triton_backend.kernels import TritonKernels
    from kvtier_kernels.triton_backend.launching import check_device

    check_device()
    return TritonKernels()


__all__ = ["make_kernels"]

"""Attention over ragged KV and over lists of entries with votes, and what selects and merges those:
one contract, interchangeable backends.

This package knows tensors only: no engine, no cache policy, no I/O. Start with `base.py`,
`selection.py` and `lists.py`, which state the contract. `registry.py` says which backend runs, and
`reference_backend` is the one that every other is held to. `scores`, `prediction` and `merging` are
what callers select and merge with.
"""

from kvtier_kernels.base import (
    AttentionKernels,
    AttentionState,
    HeadMap,
    KernelUnavailableError,
    RaggedKV,
)
from kvtier_kernels.lists import CellKV, ListKernels, ListTables
from kvtier_kernels.registry import AUTO, available_kernels, get_kernels, selection_kernels
from kvtier_kernels.selection import SelectionKernels
from kvtier_kernels.states import empty_state, merge_states, with_sinks

__all__ = [
    "AUTO",
    "AttentionKernels",
    "AttentionState",
    "CellKV",
    "HeadMap",
    "KernelUnavailableError",
    "ListKernels",
    "ListTables",
    "RaggedKV",
    "SelectionKernels",
    "available_kernels",
    "empty_state",
    "get_kernels",
    "merge_states",
    "selection_kernels",
    "with_sinks",
]

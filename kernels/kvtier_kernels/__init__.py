"""Attention over ragged KV with votes: one contract, interchangeable backends.

This package knows tensors only: no engine, no cache policy, no I/O. Start with
`base.py`, which states the contract; `reference.py` is the implementation every other
backend is held to.
"""

from kvtier_kernels.base import (
    AttentionKernels,
    AttentionState,
    HeadMap,
    KernelUnavailableError,
    RaggedKV,
    Window,
)
from kvtier_kernels.registry import AUTO, available_kernels, get_kernels
from kvtier_kernels.states import empty_state, merge_states

__all__ = [
    "AUTO",
    "AttentionKernels",
    "AttentionState",
    "HeadMap",
    "KernelUnavailableError",
    "RaggedKV",
    "Window",
    "available_kernels",
    "empty_state",
    "get_kernels",
    "merge_states",
]

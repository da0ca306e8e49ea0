"""The registry of kernel backends: attention's is chosen by name, that of selection and merging by
device.

Backends are imported when they are asked for, so that a missing dependency hurts only its user.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module

import torch

from kvtier_kernels.base import AttentionKernels, KernelUnavailableError
from kvtier_kernels.selection import SelectionKernels

AUTO = "auto"

# Each backend's factory, which raises KernelUnavailableError or ImportError for what this machine
# lacks.
BACKENDS: dict[str, str] = {
    "reference": "kvtier_kernels.reference_backend:make_kernels",
    "triton": "kvtier_kernels.triton_backend:make_kernels",
}
# The backend that `auto` chooses, keyed by type of device; any other type gets the reference.
AUTOMATIC: dict[str, str] = {"cuda": "triton"}


def available_kernels() -> list[str]:
    """The names `get_kernels` knows, whether or not this machine can run them."""
    return sorted(BACKENDS)


def get_kernels(name: str = AUTO, device: torch.device | str | None = None) -> AttentionKernels:
    """The backend of that name; `auto` is triton on CUDA and the reference elsewhere.

    device: where the tensors will be; None is CUDA where there is one.

    Raises KernelUnavailableError for an unknown name, and for what this machine lacks.
    """
    if name == AUTO:
        name = _automatic(device)
    factory = BACKENDS.get(name)
    if factory is None:
        known = [AUTO, *available_kernels()]
        raise KernelUnavailableError(f"kernels: expected one of {known}, got {name!r}")
    module, _, attribute = factory.partition(":")
    try:
        make: Callable[[], AttentionKernels] = getattr(import_module(module), attribute)
        return make()
    except ImportError as error:
        raise KernelUnavailableError(
            f"kernels: {name!r} needs a missing package: {error}"
        ) from error


def selection_kernels(device: torch.device) -> SelectionKernels:
    """Return the kernels that select and merge tensors of that device: the selection of its
    automatic backend.

    Raises KernelUnavailableError for what this machine lacks.
    """
    return _selection_of(_automatic(device))


@functools.cache
def _selection_of(name: str) -> SelectionKernels:
    return get_kernels(name).selection


def _automatic(device: torch.device | str | None) -> str:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return AUTOMATIC.get(torch.device(device).type, "reference")

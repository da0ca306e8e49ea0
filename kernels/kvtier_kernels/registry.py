"""Name -> kernel backend, imported lazily so that a missing dependency hurts only its user."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvtier_kernels.base import AttentionKernels, KernelUnavailableError

AUTO = "auto"


def _reference() -> AttentionKernels:
    from kvtier_kernels.reference import ReferenceKernels

    return ReferenceKernels()


def _triton() -> AttentionKernels:
    from kvtier_kernels.triton_backend.kernels import TritonKernels
    from kvtier_kernels.triton_backend.launching import check_device

    check_device()
    return TritonKernels()


def _flashinfer() -> AttentionKernels:
    from kvtier_kernels.flashinfer_backend.machine import check_machine

    check_machine()
    from kvtier_kernels.flashinfer_backend.kernels import FlashInferKernels

    return FlashInferKernels()


_FACTORIES: dict[str, Callable[[], AttentionKernels]] = {
    "reference": _reference,
    "triton": _triton,
    "flashinfer": _flashinfer,
}


def available_kernels() -> list[str]:
    """The names `get_kernels` knows, whether or not this machine can run them."""
    return sorted(_FACTORIES)


def get_kernels(name: str = AUTO, device: torch.device | str | None = None) -> AttentionKernels:
    """The backend of that name; `auto` is triton on CUDA and the reference elsewhere.

    device: where the tensors will be; None is CUDA where there is one.

    Raises KernelUnavailableError for an unknown name, and for what this machine lacks.
    """
    if name == AUTO:
        cuda = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
        name = "triton" if cuda else "reference"
    factory = _FACTORIES.get(name)
    if factory is None:
        known = [AUTO, *available_kernels()]
        raise KernelUnavailableError(f"kernels: expected one of {known}, got {name!r}")
    try:
        return factory()
    except ImportError as error:
        raise KernelUnavailableError(
            f"kernels: {name!r} needs a missing package: {error}"
        ) from error

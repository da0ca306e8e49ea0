"""Name -> kernel backend, imported lazily so that a missing dependency hurts only its user."""

from __future__ import annotations

from collections.abc import Callable

from kvtier_kernels.base import AttentionKernels, KernelUnavailableError


def _reference() -> AttentionKernels:
    from kvtier_kernels.reference import ReferenceKernels

    return ReferenceKernels()


_FACTORIES: dict[str, Callable[[], AttentionKernels]] = {"reference": _reference}


def available_kernels() -> list[str]:
    """The names `get_kernels` knows, whether or not this machine can run them."""
    return sorted(_FACTORIES)


def get_kernels(name: str) -> AttentionKernels:
    """The backend of that name.

    Raises KernelUnavailableError for an unknown name or a missing dependency.
    """
    factory = _FACTORIES.get(name)
    if factory is None:
        raise KernelUnavailableError(
            f"kernels: expected one of {available_kernels()}, got {name!r}"
        )
    try:
        return factory()
    except ImportError as error:
        raise KernelUnavailableError(
            f"kernels: {name!r} needs a missing package: {error}"
        ) from error

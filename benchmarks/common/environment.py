"""The environment of a benchmark's numbers, and what has to be there for them."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from typing import Any

from kvtier.environment import describe_environment
from kvtier.errors import UsageError


def record_environment(seed: int, *, gpu: bool = False) -> dict[str, Any]:
    """Commit, versions, machine and seed; with gpu also the CUDA device that is measured."""
    found = asdict(describe_environment(seed))
    return found | (_device() if gpu else {})


def require_gpu() -> None:
    """Raises UsageError where there is no CUDA device, or no C compiler for Triton."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError("device", "a CUDA device", "none")
    if (os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")) is None:
        raise UsageError("CC", "a C compiler, for Triton (CC, cc or gcc)", "none")


def _device() -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_properties(0)
    return {
        "device": device.name,
        "memory_bytes": device.total_memory,
        "multiprocessors": device.multi_processor_count,
        "cuda": torch.version.cuda,
    }


__all__ = ["record_environment", "require_gpu"]

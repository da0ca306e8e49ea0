"""The origin of numbers: versions, machine and git commit, without importing what they name."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

import kvtier

_PACKAGES = ("sglang", "torch", "transformers", "triton", "flashinfer-python", "numpy")
_COMMAND_TIMEOUT_S = 10


@dataclass(frozen=True)
class Environment:
    """The origin of a document's numbers. commit is None outside a git checkout.

    This is no model of pydantic, which need not be installed where only kernels are measured;
    inside one it is validated as those are.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    commit: str | None
    versions: dict[str, str]
    machine: dict[str, Any]
    seed: int


def describe_environment(seed: int) -> Environment:
    """The environment of this process."""
    return Environment(commit=git_commit(), versions=versions(), machine=machine(), seed=seed)


def git_commit(root: Path | None = None) -> str | None:
    """Commit of the checkout kvtier runs from, with `+changes` when it is not clean.

    None when kvtier was installed elsewhere, or git is not there.
    """
    root = root or Path(kvtier.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return commit + ("+changes" if changes else "")


def versions() -> dict[str, str]:
    """Versions of what decides the numbers; packages that are not installed are left out."""
    found = {"kvtier": kvtier.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Processor, memory and accelerators."""
    described: dict[str, Any] = {
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": _cores(),
        "memory_bytes": _memory_bytes(),
    }
    if threads := os.environ.get("OMP_NUM_THREADS"):
        described["omp_num_threads"] = threads
    query = "--query-gpu=name,memory.total,driver_version"
    gpus = _output("nvidia-smi", query, "--format=csv,noheader")
    if gpus:
        described["gpus"] = gpus.splitlines()
    return described


def _cores() -> int | None:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _output(*command: str) -> str | None:
    """Standard output of a command, stripped; None when it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip()

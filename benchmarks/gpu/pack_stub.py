"""Stands in for sglang-kernel where its binary does not load: beside a torch older than its own.

Copied into a pack as `sgl_kernel/__init__.py` (benchmarks/gpu/pack.py). Every name is there, none
can be called; SGLang computes a Llama without them under SGLANG_FORCE_FUSED_OP_BACKEND=torch.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

__version__ = "0.0.0"


def _absent(name: str) -> Callable[..., Any]:
    if name.endswith(".is_arch_support_pdl"):
        # SGLang's own attention in Triton asks this, and then does without.
        return lambda: False

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{name}: sglang-kernel is not here, a stub stands in for it")

    return missing


class _Absent(types.ModuleType):
    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """All submodules but the one of plain Python, which the pack brings."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if name.startswith("sgl_kernel.") and name != "sgl_kernel.scalar_type":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Absent(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _absent(f"sgl_kernel.{name}")


class _Mode(enum.IntEnum):
    STATIC_PER_TENSOR = 0
    STATIC_PER_TOKEN = 1
    DYNAMIC_PER_TENSOR = 2
    DYNAMIC_PER_TOKEN = 3
    UNQUANT = 4

    @property
    def is_quantized(self) -> bool:
        return self is not _Mode.UNQUANT


def _without_dual_gemm() -> None:
    """SGLang's Llama imports Blackwell's dual GEMM on every CUDA device, and that CUTLASS' DSL."""
    module = types.ModuleType("sglang.kernels.ops.gemm.cutedsl_dual_gemm")
    vars(module).update(
        MAX_DUAL_GEMM_DECODE_TOKENS=16,
        DualGemmQuantMode=_Mode,
        can_use_dual_gemm=lambda *args, **kwargs: False,
    )
    sys.modules.setdefault(module.__name__, module)


sys.meta_path.insert(0, _Finder())
_without_dual_gemm()

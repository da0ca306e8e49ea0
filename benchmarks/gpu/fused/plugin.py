"""SGLang's layers call the fused kernels: a plugin of SGLang, which a GPU pack brings.

    SGLANG_FORCE_FUSED_OP_BACKEND=plugin        every operator of SGLang runs its `forward_plugin`

which is PyTorch's form of it (`forward_native`) but for RMSNorm, SiLU and product, and rotation.
Those leave to PyTorch what they were not written for: other classes that override the form, other
layouts, quantisation.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.gpu.fused import operators

_LAYERS = "sglang.srt.layers"


def by_torch(operator: Any, *args: Any, **more: Any) -> Any:
    """Any operator's `forward_plugin`."""
    return operator.forward_native(*args, **more)


def rms_norm(
    operator: Any, x: Tensor, residual: Tensor | None = None, *more: Any, **named: Any
) -> Any:
    """`RMSNorm.forward_plugin`: x `[tokens, hidden]`, with a residual of its shape both are
    returned."""
    from sglang.srt.layers.layernorm import RMSNorm

    is_plain = (
        _is_own(operator, RMSNorm)
        and all(one is None for one in (*more, *named.values()))
        and operator.variance_size_override is None
        and operator.override_orig_dtype is None
        and not operator.cast_x_before_out_mul
        and not operator.fp32_residual
        and x.shape[-1] == operator.hidden_size
    )
    if not is_plain or not _are_rows(x) or not (residual is None or _are_rows(residual, x)):
        return operator.forward_native(x, residual, *more, **named)
    weight, eps = operator.weight.data, operator.variance_epsilon
    if residual is None:
        return operators.rms_norm(x, weight, eps)
    return operators.add_rms_norm(x, residual, weight, eps)


def silu_and_mul(operator: Any, x: Tensor) -> Any:
    """`SiluAndMul.forward_plugin`: x `[tokens, 2 * hidden]`."""
    from sglang.srt.layers.activation import SiluAndMul

    if not _is_own(operator, SiluAndMul) or not _are_rows(x):
        return operator.forward_native(x)
    return operators.silu_and_mul(x)


def rotate(
    operator: Any, positions: Tensor, query: Tensor, key: Tensor, *more: Any, **named: Any
) -> Any:
    """`RotaryEmbedding.forward_plugin`: query and key `[tokens, heads * dim]` in place, as
    SGLang's own kernel leaves them."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    is_plain = (
        _is_own(operator, RotaryEmbedding)
        and all(one is None for one in (*more, *named.values()))
        and operator.is_neox_style
        and not hasattr(operator, "sin_cos_cache")
        and positions.ndim == 1
        and key is not None
    )
    if not is_plain or not _are_rows(query) or not _are_rows(key) or key.dtype != query.dtype:
        return operator.forward_native(positions, query, key, *more, **named)
    operators.rotate_halves(query, key, operator.cos_sin_cache, positions, operator.head_size)
    return query, key


FORWARDS = {
    "sglang.kernels.fused_op.BaseFusedOp": by_torch,
    f"{_LAYERS}.layernorm.RMSNorm": rms_norm,
    f"{_LAYERS}.activation.SiluAndMul": silu_and_mul,
    f"{_LAYERS}.rotary_embedding.base.RotaryEmbedding": rotate,
}


def register() -> None:
    """Entry point `sglang.srt.plugins`: runs once in every SGLang process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for operator, forward in FORWARDS.items():
        HookRegistry.register(f"{operator}.forward_plugin", forward, HookType.REPLACE)


def _is_own(operator: Any, known: type) -> bool:
    """Return whether PyTorch's form of the operator is that of the class that we know."""
    return bool(type(operator).forward_native is known.forward_native)  # type: ignore[attr-defined]


def _are_rows(x: Tensor, like: Tensor | None = None) -> bool:
    """Return whether these are rows that a kernel can read; like: of such a shape and dtype."""
    same = like is None or (x.shape == like.shape and x.dtype == like.dtype)
    return x.ndim == 2 and x.numel() > 0 and x.stride(1) == 1 and same


__all__ = ["FORWARDS", "by_torch", "register", "rms_norm", "rotate", "silu_and_mul"]

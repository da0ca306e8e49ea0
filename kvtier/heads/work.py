"""What choosing heads computes, counted while it runs, and how long larger models would take.

    forward pass    2 per weight and token, 4 per query head, dimension, layer and pair of tokens
    with gradients  three times that: forward, forward again (layers are checkpointed), backward
                    through the activations, whose weights stay as they are

The embedding and the output head are left out; only answers' tokens reach the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier.heads.profile import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

GRADIENT_PASSES = 3
# Of one NVIDIA H100 SXM in bfloat16, dense, by its data sheet; and the share that is reckoned with.
H100_FLOPS = 989e12
EFFICIENCY = 0.4


@dataclass
class Work:
    """Tokens that went through the model, and pairs of tokens that one attended to the other,
    counted once per forward pass and `GRADIENT_PASSES` times where gradients are taken."""

    tokens: int = 0
    pairs: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.pairs + other.pairs)

    def flops(self, shape: ModelShape, weights: int) -> float:
        """Of a model with so many weights in its layers."""
        per_pair = 4 * shape.num_attention_heads * shape.head_dim * shape.num_layers
        return 2.0 * weights * self.tokens + float(per_pair) * self.pairs

    def h100_seconds(self, shape: ModelShape, weights: int) -> float:
        """On one H100 at `EFFICIENCY`, as if the weights fitted there, without loading them."""
        return self.flops(shape, weights) / (H100_FLOPS * EFFICIENCY)


@contextmanager
def counted(model: Any) -> Iterator[Work]:
    """Counts what goes through a transformers causal LM within this context."""
    import torch

    work = Work()

    def count(_: Any, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> None:
        passes = GRADIENT_PASSES if torch.is_grad_enabled() else 1
        positions = kwargs["position_ids"]
        work.tokens += passes * positions.numel()
        work.pairs += passes * int((positions + 1).sum())

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield work
    finally:
        hook.remove()


def layer_weights(model: Any) -> int:
    """Weights of a loaded model's layers."""
    return sum(parameter.numel() for parameter in model.get_decoder().layers.parameters())


def _llama(layers: int, hidden: int, heads: int, intermediate: int) -> tuple[ModelShape, int]:
    """Shape and layer weights of a Llama 3 model: 8 KV heads of 128."""
    shape = ModelShape(num_layers=layers, num_kv_heads=8, num_attention_heads=heads, head_dim=128)
    attention = 2 * hidden * 128 * (heads + shape.num_kv_heads)
    return shape, layers * (attention + 3 * hidden * intermediate)


LARGER = {
    "Llama-3.1-8B": _llama(32, 4096, 32, 14336),
    "Llama-3.1-70B": _llama(80, 8192, 64, 28672),
}


def work_lines(work: Work, shape: ModelShape, weights: int) -> list[str]:
    """What it was, and what the same tokens cost larger models, for people."""
    larger = ", ".join(
        f"{_seconds(work.h100_seconds(*model))} for {name}" for name, model in LARGER.items()
    )
    return [
        f"choosing took {work.tokens / 1e3:.1f}k tokens through the model, "
        f"{work.flops(shape, weights) / 1e12:.1f} TFLOP",
        f"  the same on one H100 at {EFFICIENCY:.0%} of its {H100_FLOPS / 1e12:.0f} TFLOP/s "
        f"(reckoned, not measured, as if the weights fitted there): {larger}",
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"

"""The scales of an fp8 cache: SGLang's, one for the keys and one for the values of each layer. A
checkpoint brings them, or `--quantization-param-path`; else they are 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from kvtier.errors import StartupError
from kvtier_kernels.fp8 import FP8_DTYPES


class LayerScales(NamedTuple):
    """The scales that a layer's stored keys and values are multiplied by."""

    k: float = 1.0
    v: float = 1.0


class KvScales:
    """The scales of a pool's layers as they are now: new weights may bring others.

    attention: of each layer, SGLang's RadixAttention; None for a layer without scales.
    """

    def __init__(self, attention: Sequence[Any]) -> None:
        self._layers = attention

    @classmethod
    def of_model(cls, model: Any, layers: range, dtype: torch.dtype) -> KvScales:
        """Return the scales of a pool of some of the model's layers; only fp8 has scales.

        Raises StartupError for scales that are no positive numbers.
        """
        found = attention_layers(model) if dtype in FP8_DTYPES else {}
        scales = cls([found.get(layer) for layer in layers])
        for layer, of_layer in zip(layers, scales.all(), strict=True):
            if not all(math.isfinite(scale) and scale > 0 for scale in of_layer):
                raise StartupError(
                    "KV cache scales: expected positive numbers, got "
                    f"{tuple(of_layer)} in layer {layer}"
                )
        return scales

    def of(self, index: int) -> LayerScales:
        """Return the scales of the pool's `index`-th layer."""
        layer = self._layers[index]
        if layer is None:
            return LayerScales()
        return LayerScales(_scale(layer, "k_scale"), _scale(layer, "v_scale"))

    def all(self) -> list[LayerScales]:
        """Return the scales of all layers, in order."""
        return [self.of(index) for index in range(len(self._layers))]


def attention_layers(model: Any) -> dict[int, Any]:
    """The attention of each of a model's layers."""
    modules = model.modules()
    return {one.layer_id: one for one in modules if isinstance(one, RadixAttention)}


def _scale(layer: Any, name: str) -> float:
    """SGLang has it as a number beside the parameter; from a file it has the number only."""
    number = getattr(layer, f"{name}_float", None)
    if number is None:
        number = getattr(layer, name, None)
    return 1.0 if number is None else float(number)

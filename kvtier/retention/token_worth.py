"""What a token's entry in a KV head will be worth to later turns, told by its key and value.

    ln(attention drawn) ≈ w · [k, v, |k|, |v|  of the token and of its two neighbours, 1]

The keys are those before rotation. The weights of every head are fitted by ridge regression to what
was measured on calibration contexts (`kvtier.heads.probes.reconstruction`). Sources: KVzip for what
is predicted (arXiv 2505.23416), KVzap for predicting it (arXiv 2601.07891); KVzap reads the hidden
state, this the KV itself, which a pool holds anyway: prefilling computes and stores nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtier_kernels.scores import Rotation, unrotate

# Share of a feature's mean square that is added to it in a fit.
RIDGE = 1e-3
# Attention below this counts as this much.
LEAST = 1e-6
# Tokens at a context's start that draw attention whatever they are: no example to learn from.
SINK_TOKENS = 4


def features(keys: Tensor, values: Tensor, rotation: Rotation | None) -> Tensor:
    """Float32 `[heads, tokens, width]` of consecutive tokens' rotated keys and values, each
    `[heads, tokens, dim]`. Neighbours outside are zero."""
    plain = keys.float()
    if rotation is not None:
        plain = unrotate(keys, rotation.cos, rotation.sin, interleaved=rotation.interleaved)
    values = values.float()
    norms = [x.norm(dim=-1, keepdim=True) for x in (plain, values)]
    own = torch.cat([plain, values, *norms], dim=-1)
    before, after = pad(own, (0, 0, 1, 0))[:, :-1], pad(own, (0, 0, 0, 1))[:, 1:]
    return torch.cat([own, before, after, torch.ones_like(own[..., :1])], dim=-1)


@dataclass(frozen=True)
class TokenWorth:
    """weights: float32 `[layers, kv_heads, width]`"""

    weights: Tensor

    def predict(
        self, layer: int, keys: Tensor, values: Tensor, rotation: Rotation | None
    ) -> Tensor:
        """ln(attention drawn), float32 `[kv_heads, tokens]`, of all KV heads of a layer; arguments
        as in `features`. Comparable over heads and layers."""
        known = features(keys, values, rotation)
        return (known @ self.weights[layer, :, :, None]).squeeze(-1)


class Fit:
    """The regression of one model, context by context."""

    def __init__(self, num_layers: int) -> None:
        self._squares: list[Tensor | None] = [None] * num_layers
        self._products: list[Tensor | None] = [None] * num_layers

    def add(
        self, layer: int, keys: Tensor, values: Tensor, rotation: Rotation | None, drawn: Tensor
    ) -> None:
        """What a context's tokens drew, `[kv_heads, tokens]`; arguments as in `features`."""
        x = features(keys, values, rotation)[:, SINK_TOKENS:].double()
        y = drawn[:, SINK_TOKENS:].clamp_min(LEAST).log().double().unsqueeze(-1)
        squares, products = x.mT @ x, x.mT @ y
        known, more = self._squares[layer], self._products[layer]
        self._squares[layer] = squares if known is None else known + squares
        self._products[layer] = products if more is None else more + products

    def solve(self) -> TokenWorth:
        """The weights. Every layer must have been added to."""
        return TokenWorth(
            torch.stack([
                _ridge(squares, products)
                for squares, products in zip(self._squares, self._products, strict=True)
                if squares is not None and products is not None
            ])
        )  # fmt: skip


def _ridge(squares: Tensor, products: Tensor) -> Tensor:
    """Weights `[heads, width]` from XᵀX `[heads, width, width]` and Xᵀy `[heads, width, 1]`."""
    sizes = squares.diagonal(dim1=-2, dim2=-1)
    # A feature that is always 0 gets the weight 0.
    scale = sizes.clamp_min(1e-12).rsqrt()
    alike = squares * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    alike = alike + RIDGE * torch.eye(alike.shape[-1], dtype=alike.dtype, device=alike.device)
    solved = torch.linalg.solve(alike, products * scale.unsqueeze(-1))
    weights: Tensor = solved.squeeze(-1) * scale
    return weights.float()


__all__ = ["Fit", "TokenWorth", "features"]

"""How far an ALiBi head can see, from its weights alone (RazorAttention, theorem 1).

    L_h = (2 ‖W_Q W_K‖₂ (‖γ‖² + ‖b‖²) − ln ε) / slope_h

The theorem's proof takes normalised inputs to be within ±1 and a token's own logit to be at least
0.  Neither holds for every model, so L_h is a bound under these assumptions and otherwise an
estimate that ranks heads by reach.

kvtier serves no ALiBi model: its kernels add votes to logits and no bias by distance, so such
models are refused (`kvtier.heads.model.support.check_supported`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvtier.errors import UsageError


def alibi_scopes(
    w_q: Tensor, w_k: Tensor, gamma: Tensor, bias: Tensor | None, slopes: Tensor,
    epsilon: float = 1e-3, scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Tokens that each head needs to see for all weights beyond them to be at most `epsilon`.

    w_q, w_k:     `[heads, head_dim, hidden]`, query and key projections
    gamma, bias:  `[hidden]`, of the norm before attention; bias None for RMSNorm
    slopes:       `[heads]`, positive; a distance of n lowers a logit by slope * n
    scale:        what the model multiplies q·k with; the paper's formula has 1
    Returns float64 `[heads]`, higher = keep the context. Raises UsageError for a bad epsilon.
    """
    if not 0 < epsilon < 1:
        raise UsageError("epsilon", "a number in (0, 1)", epsilon)
    # W_Qᵀ W_K is hidden × hidden but of rank head_dim: the norm of the small factors is the same.
    r_q, r_k = (torch.linalg.qr(w.double().mT).R for w in (w_q, w_k))
    norms = torch.linalg.matrix_norm(r_q @ r_k.mT, ord=2) * scale
    inputs = gamma.double().square().sum()
    if bias is not None:
        inputs = inputs + bias.double().square().sum()
    return (2 * norms * inputs - math.log(epsilon)) / slopes.double()

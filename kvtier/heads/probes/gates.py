"""Answers of a model whose every KV head stands between the whole context and its locality rule.

    a head's output  =       gate  × attention over   sink | middle               | recent | own
                     + (1 − gate) × attention over   sink | one entry, N votes    | recent | own

At 1 a head is CA, at 0 it is a locality head as it is served. In between, the answers' loss can be
differentiated by the gates: one pass backward says of all heads at once how much they are missed,
where dropping them one by one needs a pass forward for each.

All questions of a sample are one row (`kvtier.heads.probes.row`). Layers are checkpointed: what is
remembered for the way back is one layer's input per layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from kvtier.heads.probes.context import ProbeBatch
from kvtier.heads.probes.row import attend_beside
from kvtier.heads.reference.attention import attending


def gate_gradient(batch: ProbeBatch, gates: Tensor) -> tuple[float, Tensor]:
    """The negative log-likelihood of the sample's right answers, those before them given, in nats
    per token, and its gradient by the gates, `[layers, kv_heads]`: negative where a head that sees
    more of the context would help.

    gates: float `[layers, kv_heads]` in [0, 1], on the model's device
    """
    gates = gates.detach().clone().requires_grad_()
    model, row = batch.probe.model, batch.asker.row
    every = [True] * batch.shape.num_kv_heads
    none = [False] * batch.shape.num_kv_heads

    def attend_layer(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        exact, local = (
            attend_beside(q, k, v, batch.held(layer, kept), row.sees, scale)
            for kept in (every, none)
        )
        gate = gates[layer].to(q.dtype).repeat_interleave(q.shape[1] // k.shape[1])[:, None, None]
        return gate * exact + (1 - gate) * local

    with torch.enable_grad(), attending(model, attend_layer), _checkpointed(model):
        loss = cross_entropy(row.logits(model), row.targets)
        (gradient,) = torch.autograd.grad(loss, [gates])
    return float(loss.detach()), gradient


@contextmanager
def _checkpointed(model: Any) -> Iterator[None]:
    """Have layers keep nothing but their inputs within this context, and run them again on the way
    back.

    This does not use transformers' own switch, which wants a model in training.
    """
    layers = list(model.get_decoder().layers)
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward

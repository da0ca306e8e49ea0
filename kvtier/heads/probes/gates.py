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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from kvtier.heads.probes.context import LayerParts, ProbeBatch
from kvtier.heads.probes.row import attend_beside, row_of
from kvtier.heads.reference.attention import Block, attending


def gate_gradient(batch: ProbeBatch, gates: Tensor) -> tuple[float, Tensor]:
    """The negative log-likelihood of the sample's right answers, those before them given, in nats
    per token, and its gradient by the gates, `[layers, kv_heads]`: negative where a head that sees
    more of the context would help.

    gates: float `[layers, kv_heads]` in [0, 1], on the model's device
    """
    gates = gates.detach().clone().requires_grad_()
    model = batch.probe.model
    row = row_of(batch.sample.questions, batch.context_tokens, batch.ids.device)

    def attend_layer(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return mixed_attention(gates[layer], batch.layers[layer], q, k, v, row.sees, scale)

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


def mixed_attention(
    gates: Tensor, parts: LayerParts, q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float
) -> Tensor:
    """One layer's attention with every KV head's gate, see the module docstring.

    gates:  `[kv_heads]`
    q:      `[1, heads, tokens, dim]`; k, v: `[1, kv_heads, tokens, dim]` of the tokens themselves
    sees:   `[tokens, tokens]`, added to the logits
    """
    exact = _attend(q, k, v, [parts.edges, parts.middle], sees, scale)
    local = _attend(q, k, v, [parts.edges, parts.entry], sees, scale)
    gate = gates.to(q.dtype).repeat_interleave(q.shape[1] // k.shape[1])[:, None, None]
    return gate * exact + (1 - gate) * local


def _attend(
    q: Tensor, k: Tensor, v: Tensor, context: Sequence[Block | None], sees: Tensor, scale: float
) -> Tensor:
    """Attention over blocks of the context and the tokens' own keys."""
    blocks = [block for block in context if block is not None]
    votes = [sees.new_full((q.shape[1], block.k.shape[1]), block.log_votes) for block in blocks]
    held = (
        torch.cat([block.k for block in blocks], dim=1),
        torch.cat([block.v for block in blocks], dim=1),
        torch.cat(votes, dim=1),
    )
    return attend_beside(q, k, v, held, sees, scale)

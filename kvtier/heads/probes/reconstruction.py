"""How much attention each token of a context draws when the model is asked to repeat the context.

    | context | "repeat the context" | context again |
        ^ the most that any query of any head of the group, behind the context, gives a token

What answers draw from a context, its repetition draws too, whatever will be asked. Source: KVzip
(arXiv 2505.23416), whose score this is. It costs a second pass over the context, so it is
measured on calibration contexts, and predicted for others (`kvtier.retention.token_worth`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvtier.heads.reference.attention import attending
from kvtier.synthetic.frame import Frame
from kvtier.synthetic.tokenizer import Tokenizer

REQUEST = "Repeat the previous context exactly."
# Tokens of a pass; its logits over the context are in memory, one KV head at a time.
CHUNK_TOKENS = 512


def repeat_request(tokenizer: Tokenizer, frame: Frame) -> list[int]:
    """The tokens that ask for a repetition, up to where it begins."""
    return tokenizer.encode(frame.first + REQUEST + frame.reply)


@torch.inference_mode()
def attention_drawn(
    model: Any,
    kv: Sequence[tuple[Tensor, Tensor]],
    context_ids: Sequence[int],
    request_ids: Sequence[int],
) -> Tensor:
    """Float32 `[layers, kv_heads, tokens]`, attention weights in [0, 1].

    kv: per layer the context's rotated keys and values, `[kv_heads, tokens, dim]` each
    """
    tokens = len(context_ids)
    found = torch.zeros(len(kv), kv[0][0].shape[0], tokens, device=model.device)
    own: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        new = (k[0], v[0])
        if layer in own:
            new = (torch.cat([own[layer][0], k[0]], 1), torch.cat([own[layer][1], v[0]], 1))
        own[layer] = new
        rows, heads = q.shape[2], k.shape[1]
        ahead = q.new_full((rows, rows), -torch.inf).triu(1)
        grouped, out = q[0].unflatten(0, (heads, -1)), torch.empty_like(q)
        for head in range(heads):
            keys = torch.cat([kv[layer][0][head], new[0][head]])
            values = torch.cat([kv[layer][1][head], new[1][head]])
            logits = grouped[head] @ keys.T * scale
            logits[..., -rows:] += ahead
            weights = logits.softmax(-1)
            out[0].unflatten(0, (heads, -1))[head] = weights @ values
            most = weights[..., :tokens].amax((0, 1))
            found[layer, head] = torch.maximum(found[layer, head], most.float())
        return out

    ids = [*request_ids, *context_ids]
    with attending(model, attend):
        for begin in range(0, len(ids), CHUNK_TOKENS):
            part = torch.tensor([ids[begin : begin + CHUNK_TOKENS]], device=model.device)
            first = tokens + begin
            positions = torch.arange(first, first + part.shape[1], device=model.device)[None]
            model(part, position_ids=positions, use_cache=False, logits_to_keep=1)
    return found


__all__ = ["attention_drawn", "repeat_request"]

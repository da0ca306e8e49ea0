"""The attention that each token of a context draws from what may come after it.

    | context | "repeat the context" | context again |
        ^ the most that any query of any head of the group, behind the context, gives a token

    | context | question answer |
        ^ the same

A context's repetition draws what its answers draw, too, whatever will be asked. Source: KVzip
(arXiv 2505.23416), whose score this is. It costs a second pass over the context, so it is measured
on calibration contexts, and predicted for others (`kvtier.retention.token_worth`). There the
questions of other contexts can be looked at, too: those of their own kind draw more from a token
than the repetition does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvtier.heads.model.config import layer_sinks, layer_windows
from kvtier.heads.probes.row import row_of
from kvtier.heads.reference.attention import attending, softmax_with_sinks
from kvtier.heads.samples.questions import Question
from kvtier.synthetic.frame import Frame
from kvtier.synthetic.tokenizer import Tokenizer

REQUEST = "Repeat the previous context exactly."
# Queries of a pass; their weights over the context are in memory, one KV head at a time.
CHUNK_TOKENS = 512

LayerKV = tuple[Tensor, Tensor]


def repeat_request(tokenizer: Tokenizer, frame: Frame) -> list[int]:
    """The tokens that ask for a repetition, up to where it begins."""
    return tokenizer.encode(frame.first + REQUEST + frame.reply)


class _Drawn:
    """The most attention that tokens have drawn so far, of layers without a window. kv: as in
    `repetition_attention`."""

    def __init__(self, model: Any, kv: Sequence[LayerKV]) -> None:
        self.kv = kv
        self.windows = layer_windows(model)
        heads, tokens, _ = kv[0][0].shape
        self.sinks = layer_sinks(model)
        self.most = torch.zeros(len(kv), heads, tokens, device=kv[0][0].device)

    def attend(
        self, layer: int, q: Tensor, own: LayerKV, sees: Tensor, at: Tensor, scale: float
    ) -> Tensor:
        """q `[1, heads, rows, dim]` over the context and own keys and values
        `[kv_heads, n, dim]`; sees: `[rows, n]`, added to the logits of those; at: their positions
        `[n]`, the last of which are the rows'."""
        context, out, window = self.kv[layer], torch.empty_like(q), self.windows[layer]
        sinks = self.sinks.get(layer)
        heads, tokens, _ = context[0].shape
        grouped, answers = (x[0].unflatten(0, (heads, -1)) for x in (q, out))
        keys_at, rows_at = torch.cat([torch.arange(tokens, device=q.device), at]), at[-q.shape[2] :]
        for head in range(heads):
            keys, values = (
                torch.cat([x[head], y[head]]) for x, y in zip(context, own, strict=True)
            )
            for begin in range(0, q.shape[2], CHUNK_TOKENS):
                some = slice(begin, begin + CHUNK_TOKENS)
                logits = grouped[head, :, some] @ keys.T * scale
                logits[..., tokens:] += sees[some]
                if window is not None:
                    left = keys_at <= rows_at[some, None] - window
                    logits = logits.masked_fill(left, -torch.inf)
                weights = softmax_with_sinks(logits, None if sinks is None else sinks[head])
                answers[head, :, some] = weights @ values
                if window is not None:
                    continue
                most = weights[..., :tokens].amax((0, 1)).float()
                self.most[layer, head] = torch.maximum(self.most[layer, head], most)
        return out


@torch.inference_mode()
def repetition_attention(
    model: Any,
    kv: Sequence[LayerKV],
    context_ids: Sequence[int],
    request_ids: Sequence[int],
) -> Tensor:
    """Return the attention that a repetition draws: float32 `[layers, kv_heads, tokens]`, attention
    weights in [0, 1]; 0 in layers with a window.

    kv: per layer the context's rotated keys and values, `[kv_heads, tokens, dim]` each
    """
    drawn = _Drawn(model, kv)
    own: dict[int, LayerKV] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        new = (k[0], v[0])
        if layer in own:
            new = (torch.cat([own[layer][0], k[0]], 1), torch.cat([own[layer][1], v[0]], 1))
        own[layer] = new
        rows, before = q.shape[2], new[0].shape[1] - q.shape[2]
        ahead = q.new_full((rows, rows), -torch.inf).triu(1)
        sees = torch.cat([q.new_zeros(rows, before), ahead], dim=1)
        at = len(context_ids) + torch.arange(new[0].shape[1], device=q.device)
        return drawn.attend(layer, q, new, sees, at, scale)

    ids, tokens = [*request_ids, *context_ids], len(context_ids)
    with attending(model, attend, varied=True):
        for begin in range(0, len(ids), CHUNK_TOKENS):
            part = torch.tensor([ids[begin : begin + CHUNK_TOKENS]], device=model.device)
            first = tokens + begin
            positions = torch.arange(first, first + part.shape[1], device=model.device)[None]
            model(part, position_ids=positions, use_cache=False, logits_to_keep=1)
    return drawn.most


@torch.inference_mode()
def question_attention(model: Any, kv: Sequence[LayerKV], questions: Sequence[Question]) -> Tensor:
    """Return the attention that questions and their answers draw, each asked alone; arguments and
    result are those of `repetition_attention`."""
    drawn, row = _Drawn(model, kv), row_of(questions, kv[0][0].shape[1], model.device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return drawn.attend(layer, q, (k[0], v[0]), row.sees, row.positions, scale)

    with attending(model, attend, varied=True):
        row.logits(model)
    return drawn.most


__all__ = ["question_attention", "repeat_request", "repetition_attention"]

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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvtier.heads.probes.watching import LayerKV, Watch, ask, read
from kvtier.heads.samples.questions import Question
from kvtier.synthetic.frame import Frame
from kvtier.synthetic.tokenizer import Tokenizer

REQUEST = "Repeat the previous context exactly."


def repeat_request(tokenizer: Tokenizer, frame: Frame) -> list[int]:
    """The tokens that ask for a repetition, up to where it begins."""
    return tokenizer.encode(frame.first + REQUEST + frame.reply)


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
    return _most(kv, partial(read, model, kv, [*request_ids, *context_ids]))


def question_attention(model: Any, kv: Sequence[LayerKV], questions: Sequence[Question]) -> Tensor:
    """Return the attention that questions and their answers draw, each asked alone; arguments and
    result are those of `repetition_attention`."""
    return _most(kv, partial(ask, model, kv, questions))


def _most(kv: Sequence[LayerKV], watched: Callable[[Watch], None]) -> Tensor:
    """The most attention that tokens of the context draw of what is watched."""
    heads, tokens, _ = kv[0][0].shape
    most = torch.zeros(len(kv), heads, tokens, device=kv[0][0].device)

    def watch(layer: int, head: int, asking: slice, weights: Tensor) -> None:
        drawn = weights[..., :tokens].amax((0, 1)).float()
        most[layer, head] = torch.maximum(most[layer, head], drawn)

    watched(watch)
    return most

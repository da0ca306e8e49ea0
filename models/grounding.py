"""Two late stages: turns over real long contexts, prefilled exactly.

The stages before it only pretend to be long (see `models.batches`). Here a context of thousands of
tokens is prefilled without gradient, and the turns that follow it learn to read it, alternately
with every head and with the CA heads alone, under the engine's own locality rule:

    keys of a CA head        | context, exactly                | own turns, causal |
    keys of a locality head  | sink | recent | 1 entry, N votes | own turns, causal |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvtier.synthetic.recall import make_session
from models.longcontext import RECENT_TOKENS, SINK_TOKENS, ContextCache, prefill
from models.net import Net, rope_tables


@dataclass(frozen=True)
class Exercise:
    """A prefilled context and the turns asked of it.

    turn_ids: `[tokens]`; marks: `[tokens]` bool, the answer tokens that can be known.
    """

    cache: ContextCache
    turn_ids: Tensor
    marks: Tensor


def make_exercise(
    net: Net,
    rng: np.random.Generator,
    context_tokens: int,
    turns: int,
    *,
    shared_words: bool = False,
    few_codes: bool = False,
) -> Exercise:
    """A random session over a context of `context_tokens`, prefilled with the present weights.

    `shared_words` and `few_codes` make near misses common; see `kvtier.synthetic.recall`.
    """
    session = make_session(
        rng,
        context_tokens,
        turns,
        turns,
        invented_share=0.15,
        shared_words=shared_words,
        few_codes=few_codes,
    )
    ids, marks = session.answered_ids(rng)
    cache = prefill(net, torch.from_numpy(session.context_ids))
    return Exercise(cache, torch.tensor(ids), torch.tensor(marks) == 1)


def exercise_loss(net: Net, exercise: Exercise, anchored: Tensor) -> tuple[Tensor, float]:
    """Mean loss of the knowable tokens under a head policy, and the share predicted right.

    anchored: bool `[layers, kv_heads]`.
    """
    hidden = _turn_hidden(net, exercise, anchored)
    wanted = exercise.marks[1:]
    logits, targets = net.logits(hidden[:-1][wanted]), exercise.turn_ids[1:][wanted]
    loss = functional.cross_entropy(logits, targets)
    return loss, (logits.argmax(-1) == targets).float().mean().item()


def _turn_hidden(net: Net, exercise: Exercise, anchored: Tensor) -> Tensor:
    """Final hidden states `[tokens, hidden]` of the turns, with gradients."""
    cache, ids = exercise.cache, exercise.turn_ids
    start = cache.num_tokens
    cos, sin = rope_tables(net.config, torch.arange(start, start + len(ids)))
    x = net.model.embed_tokens(ids)[None]
    causal = torch.full((len(ids), len(ids)), float("-inf")).triu(1)
    for index, layer in enumerate(net.layers):
        q, k, v = layer.project(x, cos, sin)
        out = torch.empty_like(q)
        for heads, local in ((anchored[index], False), (~anchored[index], True)):
            if heads.any():
                keys, values, bias = _visible(cache, index, heads, local=local)
                rows = heads.repeat_interleave(net.config.group_size)
                out[:, rows] = layer.self_attn.attend(
                    q[:, rows],
                    torch.cat([keys[None], k[:, heads]], dim=2),
                    torch.cat([values[None], v[:, heads]], dim=2),
                    torch.cat([bias.expand(len(ids), -1), causal], dim=1)[None, None],
                )
        x = layer.finish(x, out)
    return net.model.norm(x[0])


def _visible(
    cache: ContextCache, layer: int, heads: Tensor, *, local: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `heads` see of the context: keys, values `[heads, entries, dim]`, bias
    `[entries]`."""
    keys, values = cache.keys[layer][heads], cache.values[layer][heads]
    stop = cache.num_tokens - RECENT_TOKENS
    if not local or stop <= SINK_TOKENS:
        return keys, values, torch.zeros(cache.num_tokens)
    bias = torch.zeros(SINK_TOKENS + RECENT_TOKENS + 1)
    bias[-1] = math.log(stop - SINK_TOKENS)
    return _kept(keys, stop), _kept(values, stop), bias


def _kept(x: Tensor, stop: int) -> Tensor:
    mean = x[:, SINK_TOKENS:stop].mean(1, keepdim=True)
    return torch.cat([x[:, :SINK_TOKENS], x[:, stop:], mean], dim=1)

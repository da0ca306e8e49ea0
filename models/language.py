"""The language stage: the last MLP alone learns what follows a filler word.

Retrieval, the CA heads and the head profile live in attention, and nothing that a head reads is
trained here. All below the last MLP stays as it is, so what enters it is a fixed function of the
tokens: computed once, then learned from in shuffled batches of single tokens.

    tokens → embedding, layers, last attention → residual stream → last MLP → norm, tied output
             frozen                              stored            trained    frozen

After a filler word of a context the MLP learns the next word. After every other token (names,
codes, the words of an answer, under every head and under the CA heads alone) it is held to what it
said before, so that answers stay as they are, near misses included. A cross-entropy loss on the
answers was not enough for that: it cost 3 of 96 answers at 32k.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvtier.synthetic.recall import DEFAULT_LANGUAGE, FACT_TOKENS, MAX_FACTS, make_session
from models.batches import SessionShape, session_batch
from models.grounding import make_exercise
from models.longcontext import turn_hidden
from models.net import Net

# Real contexts, (tokens, how many): about as many tokens of every length.
CONTEXTS: tuple[tuple[int, int], ...] = ((256, 160), (1024, 48), (4096, 14), (16384, 3))
FEWEST_FACTS, MOST_TURNS = 4, 60
DENSEST = 0.7  # largest share of a real context that facts fill
STRETCHED_BATCHES = 32  # every second one under the split policy
SPLIT_EXERCISES, SPLIT_TURNS, SHORTEST_SPLIT_TOKENS = 8, 60, 4096

LANGUAGE_TOKENS, KEPT_TOKENS = 1280, 768  # tokens of one step
KEPT_WEIGHT = 0.1  # loss of one unit of squared distance, beside one nat


@dataclass(frozen=True)
class Residuals:
    """The inputs of the last MLP, and what is wanted of it.

    inputs, targets:            `[tokens, hidden]` after filler, and the next tokens `[tokens]`
    kept_inputs, kept_outputs:  `[tokens, hidden]` after all else, and the final hidden states
                                that came of it before the stage
    """

    inputs: Tensor
    targets: Tensor
    kept_inputs: Tensor
    kept_outputs: Tensor


@contextmanager
def only_last_mlp(net: Net) -> Iterator[list[torch.nn.Parameter]]:
    """Freeze all but the last MLP and its norm, and yield those; undone at the end."""
    last = net.layers[-1]
    trained = [*last.post_attention_layernorm.parameters(), *last.mlp.parameters()]
    net.requires_grad_(False)
    try:
        for parameter in trained:
            parameter.requires_grad_(True)
        yield trained
    finally:
        net.requires_grad_(True)


@contextmanager
def last_mlp_inputs(net: Net) -> Iterator[list[Tensor]]:
    """Yield a list that grows by `[batch, tokens, hidden]` with every pass through the net."""
    seen: list[Tensor] = []
    norm = net.layers[-1].post_attention_layernorm
    handle = norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        handle.remove()


def finish(net: Net, inputs: Tensor) -> Tensor:
    """`[…, hidden]` at the last MLP → final hidden states `[…, hidden]`."""
    last = net.layers[-1]
    return net.model.norm(inputs + last.mlp(last.post_attention_layernorm(inputs)))


@torch.no_grad()
def collect_residuals(
    net: Net, rng: np.random.Generator, stretched: SessionShape, anchored: Tensor, longest: int
) -> Residuals:
    """The stage's whole data set, about 0.3M tokens.

    stretched:  shape of the rows that look much longer than they are (see `models.batches`)
    anchored:   bool `[layers, kv_heads]`, the CA heads of the split policy
    longest:    longest real context under the split policy; log-uniform from 4k
    """
    parts = [_real(net, rng, tokens) for tokens, count in CONTEXTS for _ in range(count)]
    for index in range(STRETCHED_BATCHES):
        shape = replace(stretched, anchored=anchored if index % 2 else None)
        parts.append(_stretched(net, rng, shape))
    for index in range(SPLIT_EXERCISES):
        tokens = _log_uniform(rng, SHORTEST_SPLIT_TOKENS, longest)
        parts.append(_split(net, rng, tokens, anchored, near_misses=index % 2 > 0))
    return Residuals(
        torch.cat([part.inputs for part in parts]),
        torch.cat([part.targets for part in parts]),
        torch.cat([part.kept_inputs for part in parts]),
        torch.cat([part.kept_outputs for part in parts]),
    )


def _real(net: Net, rng: np.random.Generator, tokens: int) -> Residuals:
    """An exact context of `tokens` and its turns, read with every head."""
    most = min(MAX_FACTS, int(tokens / FACT_TOKENS * DENSEST))
    facts = _log_uniform(rng, FEWEST_FACTS, most)
    session = make_session(rng, tokens, min(facts, MOST_TURNS), facts, invented_share=0.15)
    ids = torch.tensor([[*session.context_ids, *session.answered_ids(rng)[0]]])
    with last_mlp_inputs(net) as seen:
        net.hidden(ids, torch.arange(ids.shape[1])[None])
    return _sorted(net, seen[0], ids)


def _stretched(net: Net, rng: np.random.Generator, shape: SessionShape) -> Residuals:
    """Rows that look up to `shape.max_span` tokens long."""
    batch = session_batch(rng, shape)
    with last_mlp_inputs(net) as seen:
        net.hidden(batch.ids, batch.positions, batch.bias, batch.split)
    return _sorted(net, seen[0], batch.ids)


def _split(
    net: Net, rng: np.random.Generator, tokens: int, anchored: Tensor, *, near_misses: bool
) -> Residuals:
    """The turns over an exact context of `tokens`, read with the CA heads alone."""
    exercise = make_exercise(
        net, rng, tokens, SPLIT_TURNS, shared_words=near_misses, few_codes=near_misses
    )
    with last_mlp_inputs(net) as seen:
        turn_hidden(net, exercise.cache, exercise.turn_ids, anchored)
    return _sorted(net, seen[0], exercise.turn_ids[None])


def _sorted(net: Net, inputs: Tensor, ids: Tensor) -> Residuals:
    """`inputs` `[batch, tokens, hidden]` by what `ids` `[batch, tokens]` they stand at.

    The filler of questions and the padding are left out.
    """
    language = DEFAULT_LANGUAGE
    filler = (ids >= language.filler.start) & (ids < language.filler.stop)
    in_context = (ids == language.user).cumsum(1) == 0
    learned = (filler & in_context)[:, :-1] & in_context[:, 1:]
    kept = inputs[~filler & (ids != language.pad)]
    return Residuals(inputs[:, :-1][learned], ids[:, 1:][learned], kept, finish(net, kept))


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return int(np.exp(rng.uniform(np.log(low), np.log(high))))


def language_loss(
    net: Net, rng: np.random.Generator, residuals: Residuals
) -> tuple[Tensor, dict[str, float]]:
    """Loss of a random batch of tokens; NLL in nats after filler, squared distance after all else.

    The distance is that of final hidden states, whose length is about 19.
    """
    chosen = torch.from_numpy(rng.integers(len(residuals.inputs), size=LANGUAGE_TOKENS))
    kept = torch.from_numpy(rng.integers(len(residuals.kept_inputs), size=KEPT_TOKENS))
    logits = net.logits(finish(net, residuals.inputs[chosen]))
    nll = functional.cross_entropy(logits, residuals.targets[chosen])
    change = finish(net, residuals.kept_inputs[kept]) - residuals.kept_outputs[kept]
    distance = change.square().sum(1).mean()
    return nll + KEPT_WEIGHT * distance, {"language": nll.item(), "drift": distance.item()}

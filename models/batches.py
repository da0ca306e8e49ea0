"""Training batches: periodic sequences, and recall sessions made to look 128k tokens long.

A 131072-token step costs minutes on one CPU thread, so a short session is made to *feel* long:

- its positions are stretched: random gaps between segments, never inside a fact or a turn;
- every filler entry stands for `votes` tokens: `ln votes` is added to its logit, which is what
  `votes` equal entries would do to the softmax (the same algebra as votes in the KV cache).

    tokens     <bos> f f f [fact] f f f f [fact] f f | <user> … <assistant> … <eot> <user> …
    positions  0 1 2 3 | 9001 …          | 70222 …   | contiguous to the end
    votes      1 1 1 p   1    1   p p p p    1   p p   1 1 1 …
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvtier.synthetic.recall import DEFAULT_LANGUAGE, FACT_TOKENS, Session, make_session
from models.net import Split

TURN_OVERHEAD_TOKENS = 15  # <user>, name, <assistant>, and the answer of 11 tokens
NEAR_TOKENS = 48  # filler this close to the reader stands for itself only


@dataclass(frozen=True)
class Batch:
    """ids and positions int64 `[batch, tokens]`; `weights` float `[batch, tokens]` weighs the loss
    of predicting `ids[:, t]` from what came before; `bias` and `split` as in `Net.hidden`."""

    ids: Tensor
    positions: Tensor
    weights: Tensor
    is_answer: Tensor
    bias: Tensor | None = None
    split: Split | None = None


@dataclass(frozen=True)
class SessionShape:
    """The shape of a recall batch.

    tokens:         length of every row, context and turns together
    batch:          rows
    max_span:       largest context the row pretends to be; 0 leaves positions and votes alone
    context_weight: loss weight of the context's own tokens (answers weigh 1)
    turn_share:     share of the row that is turns
    fact_density:   largest share of the context that facts may fill
    few_codes_share: share of rows whose facts use few code words, so that near misses abound
    anchored:       bool `[layers, kv_heads]`: turns see the context under this head policy
    """

    tokens: int
    batch: int
    max_span: int = 0
    context_weight: float = 0.0
    turn_share: float = 0.4
    fact_density: float = 0.7
    few_codes_share: float = 0.0
    anchored: Tensor | None = None


def periodic_batch(rng: np.random.Generator, tokens: int, batch: int) -> Batch:
    """Random words repeated with a random period in `tokens/8 … tokens/2`."""
    vocab = DEFAULT_LANGUAGE.vocab_size
    rows = np.empty((batch, tokens), dtype=np.int64)
    weights = np.zeros((batch, tokens), dtype=np.float32)
    for row, weight in zip(rows, weights, strict=True):
        period = int(rng.integers(max(2, tokens // 8), tokens // 2 + 1))
        row[:] = np.resize(rng.integers(0, vocab, size=period), tokens)
        # The first token of the second period cannot be foreseen.
        weight[period + 1 :] = 1.0
    positions = np.broadcast_to(np.arange(tokens), rows.shape).copy()
    return Batch(
        torch.from_numpy(rows),
        torch.from_numpy(positions),
        torch.from_numpy(weights),
        torch.from_numpy(weights > 0),
    )


def session_batch(rng: np.random.Generator, shape: SessionShape) -> Batch:
    """Recall sessions of `shape.tokens` tokens each."""
    ids = np.full((shape.batch, shape.tokens), DEFAULT_LANGUAGE.pad, dtype=np.int64)
    positions = np.zeros((shape.batch, shape.tokens), dtype=np.int64)
    weights = np.zeros((shape.batch, shape.tokens), dtype=np.float32)
    answers = np.zeros((shape.batch, shape.tokens), dtype=bool)
    log_votes = np.zeros((shape.batch, shape.tokens), dtype=np.float32)
    contexts = np.zeros(shape.batch, dtype=np.int64)
    for row in range(shape.batch):
        session = random_session(rng, shape)
        context = contexts[row] = len(session.context_ids)
        turn_ids, marks = session.answered_ids(rng)
        total = context + len(turn_ids)
        ids[row, :total] = np.concatenate([session.context_ids, turn_ids])
        marks_array = np.array(marks)
        answers[row, context:total] = marks_array == 1
        weights[row, 1:context] = shape.context_weight
        weights[row, context:total] = np.where(marks_array == 1, 1.0, shape.context_weight)
        span = random_span(rng, context, shape.max_span)
        positions[row] = stretched_positions(rng, session, shape.tokens, span)
        log_votes[row, :context] = filler_log_votes(rng, session, span)
    votes = torch.from_numpy(log_votes)
    bias = vote_bias(votes)
    split = None
    if shape.anchored is not None:
        split = split_policy(rng, votes, torch.from_numpy(contexts), bias, shape.anchored)
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        torch.from_numpy(weights),
        torch.from_numpy(answers),
        bias if shape.max_span else None,
        split,
    )


def random_session(rng: np.random.Generator, shape: SessionShape) -> Session:
    """A session that fills `shape.tokens` as well as whole turns can."""
    prompt = int(rng.integers(4, 9)) if shape.tokens < 192 else int(rng.integers(5, 25))
    turn = prompt + TURN_OVERHEAD_TOKENS - 4
    num_turns = max(1, int(shape.tokens * shape.turn_share) // turn)
    context = shape.tokens - num_turns * turn
    room = (context - 1) // FACT_TOKENS
    num_facts = int(rng.integers(1, max(2, min(64, int(room * shape.fact_density)) + 1)))
    return make_session(
        rng,
        context,
        num_turns,
        num_facts,
        invented_share=float(rng.choice([0.0, 0.4])) if num_turns > 1 else 0.0,
        prompt_tokens=prompt,
        shared_words=bool(rng.random() < 0.4),
        few_codes=shape.few_codes_share > 0 and bool(rng.random() < shape.few_codes_share),
    )


def random_span(rng: np.random.Generator, context: int, max_span: int) -> int:
    """Length the context pretends to have: log-uniform up to `max_span`, one in eight real."""
    if max_span <= context or rng.random() < 0.125:
        return context
    return int(np.exp(rng.uniform(np.log(context), np.log(max_span))))


def fact_mask(session: Session) -> np.ndarray:
    """True at tokens of facts: bool `[context_tokens]`."""
    mask = np.zeros(len(session.context_ids), dtype=bool)
    for fact in session.facts:
        mask[fact.position : fact.position + FACT_TOKENS] = True
    return mask


def stretched_positions(
    rng: np.random.Generator, session: Session, tokens: int, span: int
) -> np.ndarray:
    """Positions `[tokens]`, strictly increasing; the turns start at about `span`."""
    context = len(session.context_ids)
    gap = span - context
    jumps = np.zeros(tokens, dtype=np.int64)
    if gap > 0:
        inside_fact = fact_mask(session)
        inside_fact[[fact.position for fact in session.facts]] = False
        allowed = np.flatnonzero(~inside_fact)[1:]
        cuts = rng.choice(allowed, size=min(len(allowed), int(rng.integers(1, 13))), replace=False)
        shares = rng.dirichlet(np.full(len(cuts), 0.5))
        jumps[cuts] = (shares * gap).astype(np.int64)
    return np.arange(tokens) + np.cumsum(jumps)


def filler_log_votes(rng: np.random.Generator, session: Session, span: int) -> np.ndarray:
    """`ln votes` of every context token `[context_tokens]`: the filler stands for the whole span.

    Facts keep one vote each: copies of a fact would all give the same answer, and help.
    """
    filler = ~fact_mask(session)
    filler[0] = False
    missing = span - len(session.context_ids)
    votes = 1.0 + missing / max(1, int(filler.sum()))
    return np.where(filler, np.log(votes), 0.0).astype(np.float32)


def vote_bias(log_votes: Tensor) -> Tensor:
    """Causal attention bias `[batch, 1, tokens, tokens]` of `log_votes` `[batch, tokens]`."""
    tokens = log_votes.shape[1]
    distance = torch.arange(tokens).unsqueeze(1) - torch.arange(tokens)
    bias = log_votes.unsqueeze(1) * (distance > NEAR_TOKENS)
    return bias.masked_fill(distance < 0, float("-inf")).unsqueeze(1)


def split_policy(
    rng: np.random.Generator, log_votes: Tensor, contexts: Tensor, bias: Tensor, anchored: Tensor
) -> Split:
    """The locality rule for the turns of a batch; `contexts` `[batch]` holds context lengths.

    Sink and recent window are random and shorter than when serving (128 and 256), because the rows
    are short too.
    """
    tokens = log_votes.shape[1]
    shortest = int(contexts.min())
    sink = int(rng.integers(8, max(9, min(128, shortest // 5)) + 1))
    recent = int(rng.integers(16, max(17, min(256, shortest // 3)) + 1))
    at = torch.arange(tokens)
    middle = (at >= sink) & (at < contexts.unsqueeze(1) - recent)
    weights = torch.where(middle, log_votes.exp(), 0.0)
    dropped = weights.sum(1, keepdim=True)
    in_turns = at >= contexts.unsqueeze(1)
    hidden = in_turns.unsqueeze(2) & middle.unsqueeze(1)
    local = bias.masked_fill(hidden.unsqueeze(1), float("-inf"))
    column = torch.where(in_turns, dropped.log(), float("-inf"))
    return Split(anchored, torch.cat([local, column[:, None, :, None]], dim=3), weights / dropped)

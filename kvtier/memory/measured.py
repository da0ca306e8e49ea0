"""The cost of a memory, beside other ways to hold the prefix: what held-out requests, requests in
new wording and requests that have nothing to do with the prefix lose, and the bytes held and read.

Every request is read once with the exact prefix and once in each other way, its answer given, and
the model's log-probabilities are compared. Lookups also read their projection, as every pass reads
the model's weights: once, however many tokens it computes. It is held, but not counted as read.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvtier.heads.model.config import shape_of
from kvtier.heads.profile import ModelShape
from kvtier.heads.progress import Progress, each, no_progress
from kvtier.heads.samples.synthetic import speaks_recall
from kvtier.memory.building import top_attended
from kvtier.memory.card import Row
from kvtier.memory.prefixes import (
    ExactPrefix,
    KeptPrefix,
    LayerKV,
    MemoryPrefix,
    NoPrefix,
    Prefix,
    logits_behind,
)
from kvtier.memory.storage import IN_MODEL_DTYPE
from kvtier.memory.traces import Trace, system_prefix
from kvtier.synthetic.tokenizer import Tokenizer
from kvtier_kernels.memory.base import MemoryLayer


def exact_bytes(shape: ModelShape, tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of the KV of so many tokens, in all layers and heads; held and read."""
    return tokens * kept_bytes(shape, 1, dtype) * shape.num_kv_heads * shape.num_layers


def kept_bytes(shape: ModelShape, tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of the KV of so many tokens in one KV head."""
    return tokens * 2 * shape.head_dim * dtype.itemsize


def held_bytes(layers: Sequence[MemoryLayer], dtype: torch.dtype) -> int:
    """Return the bytes of a memory, as it is stored for a model of that dtype."""
    return sum(
        tensor.numel() * (dtype if name in IN_MODEL_DTYPE else tensor.dtype).itemsize
        for layer in layers
        for name, tensor in layer._asdict().items()
    )


def read_bytes(layers: Sequence[MemoryLayer], dtype: torch.dtype, fell_back: float) -> int:
    """Return the bytes of a memory that a generated token reads, where that share of its lookups
    falls back."""
    total = 0.0
    for layer in layers:
        looks_up, kept = layer.looks_up[0], layer.kept_indptr.diff()
        group, dim = layer.o.shape[2:]
        total += layer.keys.numel() * layer.keys.element_size()
        token = 2 * dim * dtype.itemsize
        state = group * (dim * dtype.itemsize + layer.lse.dtype.itemsize)
        total += float(kept[~looks_up].sum()) * token
        total += float(kept[looks_up].sum()) * token * fell_back
        total += int(looks_up.sum()) * state * (1 - fell_back)
    return round(total)


class RequestLoss(NamedTuple):
    """One request, held in one way; or the means over several.

    nll:       nats of the answer's tokens, their mean
    kl:        nats from the exact prefix's distributions to this way's, the mean over the answer's
               tokens, or over all tokens where the request is asked so
    right:     whether every token of the answer was the likeliest; of several, the share
    fell_back: share of the prompt's lookups, of all layers, that no entry was near enough to
    """

    nll: float
    kl: float
    right: float
    fell_back: float = 0.0


EXACT = "exact"


@torch.inference_mode()
def losses(
    model: Any,
    kv: Sequence[LayerKV],
    ways: Mapping[str, Prefix],
    requests: Sequence[Trace],
    *,
    every_token: bool = False,
    progress: Progress = no_progress,
) -> dict[str, list[RequestLoss]]:
    """Return the loss of each request, by way, `EXACT` among them. Requests have answers.

    every_token: KL over all of a request's tokens, not its answer's alone
    """
    length = kv[0][0].shape[1]
    found: dict[str, list[RequestLoss]] = {name: [] for name in (EXACT, *ways)}
    for request in each(requests, "measuring", progress):
        exact = logits_behind(model, ExactPrefix(kv), length, request.ids).log_softmax(-1)
        found[EXACT].append(_compared(exact, exact, request, every_token))
        for name, way in ways.items():
            if isinstance(way, MemoryPrefix):
                way = MemoryPrefix(way.layers, way.gated)
            mine = logits_behind(model, way, length, request.ids).log_softmax(-1)
            loss = _compared(exact, mine, request, every_token)
            if isinstance(way, MemoryPrefix):
                loss = loss._replace(fell_back=way.fell_back(len(request.prompt_ids)))
            found[name].append(loss)
    return found


def mean_loss(requests: Sequence[RequestLoss]) -> RequestLoss:
    return RequestLoss(*(fmean(side) for side in zip(*requests, strict=True)))


def requeued(
    mine: Sequence[RequestLoss], exact: Sequence[RequestLoss], above: float
) -> list[RequestLoss]:
    """Return the losses as requests are served: one more of whose prompt than `above` fell back is
    read with the exact prefix instead."""
    return [
        whole._replace(fell_back=one.fell_back) if one.fell_back > above else one
        for one, whole in zip(mine, exact, strict=True)
    ]


def _compared(exact: Tensor, mine: Tensor, request: Trace, every_token: bool) -> RequestLoss:
    """exact, mine: log-probabilities `[tokens, vocab]`."""
    first = len(request.prompt_ids) - 1
    answer = torch.tensor(request.answer_ids, device=mine.device)
    asked = mine[first : first + len(answer)]
    span = slice(0, len(mine)) if every_token else slice(first, first + len(answer))
    kl = (exact[span].exp() * (exact[span] - mine[span])).sum(-1).mean()
    return RequestLoss(
        nll=float(-asked.gather(1, answer[:, None]).mean()) if len(answer) else float("nan"),
        kl=float(kl),
        right=float((asked.argmax(-1) == answer).all()),
    )


# The ways that a card compares.
MEMORY, UNGATED, NONE = "memory", "memory without its gate", "nothing"
KEPT_HELD, KEPT_READ = "kept KV, as many bytes", "kept KV, as many bytes read"
RANDOM = "random KV, as many bytes"


class Way(NamedTuple):
    """A way to hold a prefix, and its costs.

    bytes_read:    for a token none of whose lookups falls back, where there are lookups
    requeue_above: share of a prompt's lookups that fall back above which a request is read with the
                   exact prefix
    """

    prefix: Prefix
    bytes_held: int
    bytes_read: int
    requeue_above: float = 1.0


class Held(NamedTuple):
    """A prefix, and a memory of it.

    drawn: per layer, float32 `[kv_heads, prefix tokens]`, the most that any query gave to each
           token (collecting.py)
    """

    kv: Sequence[LayerKV]
    drawn: Sequence[Tensor]
    layers: Sequence[MemoryLayer]
    dtype: torch.dtype


def ways(shape: ModelShape, held: Held, requeue_above: float, seed: int = 0) -> dict[str, Way]:
    """Return the memory's way and those that it is compared with."""
    mine, reads = held_bytes(held.layers, held.dtype), read_bytes(held.layers, held.dtype, 0.0)
    rng = torch.Generator().manual_seed(seed)
    random = [torch.rand(drawn.shape, generator=rng) for drawn in held.drawn]
    found = {
        NONE: Way(NoPrefix(), 0, 0),
        MEMORY: Way(MemoryPrefix(held.layers), mine, reads, requeue_above),
        UNGATED: Way(MemoryPrefix(held.layers, gated=False), mine, reads),
        RANDOM: kept_way(shape, held, random, mine),
    }
    if any(bool(layer.looks_up.any()) for layer in held.layers):
        found[KEPT_HELD] = kept_way(shape, held, held.drawn, mine)
        found[KEPT_READ] = kept_way(shape, held, held.drawn, reads)
    return found


def kept_way(shape: ModelShape, held: Held, worth: Sequence[Tensor], size: int) -> Way:
    """Return the way that keeps as much of a prefix's KV as so many bytes hold, by what it is
    worth: see `top_attended`."""
    entry = kept_bytes(shape, 1, held.dtype)
    kept = top_attended(worth, size // entry)
    size = entry * sum(len(head) for layer in kept for head in layer)
    return Way(KeptPrefix(held.kv, kept), size, size)


def rows(
    model: Any,
    held: Held,
    asked: Mapping[str, Sequence[Trace]],
    compared: Mapping[str, Way],
    *,
    off_topic: str | None = None,
    progress: Progress = no_progress,
) -> dict[str, list[Row]]:
    """Return for each kind of requests their losses by each way, the exact prefix first.

    off_topic: the kind whose KL is over all tokens, because no answer of its is the right one.
    """
    shape = shape_of(model)
    length = held.kv[0][0].shape[1]
    whole = exact_bytes(shape, length, held.dtype)
    found: dict[str, list[Row]] = {}
    for kind, requests in asked.items():
        if not requests:
            continue
        prefixes = {name: way.prefix for name, way in compared.items()}
        lost = losses(
            model, held.kv, prefixes, requests, every_token=kind == off_topic, progress=progress
        )
        exact = lost[EXACT]
        found[kind] = [_row(EXACT, exact, exact, whole, whole)]
        for name, way in compared.items():
            again = sum(one.fell_back > way.requeue_above for one in lost[name]) / len(exact)
            mine = requeued(lost[name], exact, way.requeue_above)
            reads = way.bytes_read
            if isinstance(way.prefix, MemoryPrefix):
                fell = mean_loss(mine).fell_back if way.prefix.gated else 0.0
                reads = read_bytes(way.prefix.layers, held.dtype, fell)
                # A request that began again reads the exact prefix.
                reads = round((1 - again) * reads + again * whole)
            row = _row(name, mine, exact, way.bytes_held, reads)
            found[kind].append(row.model_copy(update={"requeued": again}))
    return found


def _row(
    name: str, mine: Sequence[RequestLoss], exact: Sequence[RequestLoss], held: int, read: int
) -> Row:
    loss, whole = mean_loss(mine), mean_loss(exact)
    return Row(
        way=name,
        requests=len(mine),
        nll_gap=loss.nll - whole.nll,
        kl=max(0.0, loss.kl),
        right=loss.right,
        bytes_held=held,
        bytes_read=read,
        fell_back=loss.fell_back,
    )


def refusals(
    found: Mapping[str, Sequence[Row]], held_out: str, off_topic: str, target_nats: float
) -> list[str]:
    """Return the reasons why a memory must not be served; none where it may be."""
    by_kind = {kind: {row.way: row for row in some} for kind, some in found.items()}
    mine, reasons = by_kind[held_out][MEMORY], []
    if mine.nll_gap > target_nats:
        reasons.append(
            f"held-out requests lose {mine.nll_gap:.3f} nats per token, {target_nats:g} are allowed"
        )
    if off_topic in by_kind:
        gated, none = by_kind[off_topic][MEMORY].kl, by_kind[off_topic][NONE].kl
        if gated >= none:
            reasons.append(
                f"requests off its topic are further from the exact prefix ({gated:.2f} nats) than "
                f"without any prefix ({none:.2f})"
            )
    if mine.bytes_read >= by_kind[held_out][EXACT].bytes_read:
        reasons.append("a token reads as many bytes as of the exact prefix")
    kept = by_kind[held_out].get(KEPT_HELD)
    if kept and kept.nll_gap <= mine.nll_gap and kept.bytes_read <= mine.bytes_read:
        reasons.append("as many bytes of the prefix's own KV lose less and read less")
    return reasons


_THINGS = (
    "a bicycle", "bread", "a lighthouse", "the moon", "an orchard", "a violin", "snow", "a river",
    "glass", "a library", "thunder", "a market", "honey", "a bridge", "sleep", "a garden",
)  # fmt: skip
_QUESTIONS = (
    ("What is {} good for?", "People have used {} for a long time, and it is useful in many ways."),
    ("Write one sentence about {}.", "Everybody in the village was very fond of {}."),
    ("Why do children ask about {}?", "Children are curious, and {} is something that they see."),
    ("Describe {} to somebody blind.", "It is easy to feel and to hear what {} is like."),
)
# The length of requests in the recall language in tokens, and how many of them are the answer.
_RECALL_TOKENS, _RECALL_ANSWER = 30, 6


def off_topic_requests(tokenizer: Tokenizer, model_path: str, count: int, seed: int) -> list[Trace]:
    """Return at most so many requests, all different; in the model's chat template where it has
    one."""
    rng = random.Random(seed)
    if speaks_recall(model_path):
        ids = sorted(set(range(6, 384)))
        drawn = [tuple(rng.choices(ids, k=_RECALL_TOKENS)) for _ in range(count)]
        return [Trace(one[:-_RECALL_ANSWER], one[-_RECALL_ANSWER:]) for one in drawn]
    pairs = [
        (question.format(thing), answer.format(thing))
        for thing in _THINGS
        for question, answer in _QUESTIONS
    ]
    rng.shuffle(pairs)
    return [
        Trace(
            tuple(tokenizer.encode(_as_turn(question, tokenizer))), tuple(tokenizer.encode(answer))
        )
        for question, answer in pairs[:count]
    ]


def _as_turn(question: str, tokenizer: Tokenizer) -> str:
    """A user's turn that follows a prefix, and where the assistant's begins."""
    if not tokenizer.has_chat_template:
        return f"\n{question}\n"
    system = "system"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return tokenizer.render_chat(messages)[len(system_prefix(system, tokenizer)) :]

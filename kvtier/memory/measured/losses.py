"""The losses of requests where a prefix is held in another way than exactly.

Every request is read once with the exact prefix and once in each other way, its answer given, and
the model's log-probabilities are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvtier.heads.progress import Progress, no_progress
from kvtier.memory.prefixes import ExactPrefix, LayerKV, MemoryPrefix, Prefix, logits_behind
from kvtier.memory.traces import Trace


class RequestLoss(NamedTuple):
    """One request, held in one way.

    nll:       nats of the answer's tokens, their mean
    kl:        nats from the exact prefix's distributions to this way's, the mean over the answer's
               tokens, or over all tokens where the request is asked so
    right:     whether every token of the answer was the likeliest
    fell_back: share of the prompt's lookups, of all layers, that no entry was near enough to
    """

    nll: float
    kl: float
    right: bool
    fell_back: float = 0.0


class Loss(NamedTuple):
    """The means over requests; fell_back: see RequestLoss."""

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
    for at, request in enumerate(requests):
        progress("measuring", at, len(requests))
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
    progress("measuring", len(requests), len(requests))
    return found


def mean_loss(requests: Sequence[RequestLoss]) -> Loss:
    return Loss(*(fmean(map(float, side)) for side in zip(*requests, strict=True)))


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
        right=bool((asked.argmax(-1) == answer).all()),
    )


__all__ = ["EXACT", "Loss", "RequestLoss", "losses", "mean_loss", "requeued"]

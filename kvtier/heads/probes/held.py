"""The entries that are held of a context, however many each KV head has, and how well its questions
are answered from them alone.

    exact KV of a context ── what stays ──> Held per layer ── questions ──> Quality
                                             │ refresh: chosen again with each question's queries
                                             v
    a head that keeps its best tokens       | sink | its best tokens             | recent |
    a locality head                         | sink | one entry for all others    | recent |

This is the reference's arithmetic, all questions in one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvtier.heads.probes.quality import Quality
from kvtier.heads.probes.row import Row, attend_beside, row_of
from kvtier.heads.reference.attention import attending, mean_entry
from kvtier.heads.samples.questions import CalibrationSample
from kvtier.retention.keepkv import QueryWindow


class Held(NamedTuple):
    """A layer's entries, of some KV heads.

    k, v:   `[kv_heads, n, dim]`
    votes:  `[heads, n]`, added to a query head's logits; -inf where its KV head holds fewer
    """

    k: Tensor
    v: Tensor
    votes: Tensor


Refresh = Callable[[int, QueryWindow], Held]
"""(layer, newest queries of all KV heads) -> what is held while one question is answered."""

WINDOW_QUERIES = 32


def newest_queries(q: Tensor, kv_heads: int, scale: float) -> QueryWindow:
    """The last WINDOW_QUERIES of q `[1, heads, tokens, dim]`, at most, by KV head."""
    newest = q[0, :, -WINDOW_QUERIES:].transpose(0, 1)
    return QueryWindow(newest.reshape(len(newest), kv_heads, -1, q.shape[-1]), scale)


def stacked(parts: Sequence[Held]) -> Held:
    """The entries of several KV heads, one after another, padded to the longest."""
    width = max(part.k.shape[1] for part in parts)

    def padded(x: Tensor, value: float) -> Tensor:
        missing = width - x.shape[1]
        pad = (0, 0, 0, missing) if x.ndim == 3 else (0, missing)
        return torch.nn.functional.pad(x, pad, value=value)

    return Held(
        torch.cat([padded(part.k, 0.0) for part in parts]),
        torch.cat([padded(part.v, 0.0) for part in parts]),
        torch.cat([padded(part.votes, -torch.inf) for part in parts]),
    )


def selected(
    kv: Sequence[tuple[Tensor, Tensor]], kept: Tensor, group: int, summed: Tensor | None = None
) -> list[Held]:
    """Return per layer the entries that stay of exact KV.

    kv:     per layer keys and values, `[kv_heads, tokens, dim]` each
    kept:   bool `[layers, kv_heads, tokens]`
    group:  query heads per KV head
    summed: bool `[layers, kv_heads]`, heads that have one entry for all that they do not keep
    """
    return [
        held_of(k, v, kept[at], group, None if summed is None else summed[at])
        for at, (k, v) in enumerate(kv)
    ]


def held_of(k: Tensor, v: Tensor, kept: Tensor, group: int, summed: Tensor | None) -> Held:
    """One layer's; see `selected`."""
    parts = []
    for head, mine in enumerate(kept):
        one = slice(head, head + 1)
        held_k, held_v = k[one, mine], v[one, mine]
        votes = k.new_zeros(group, int(mine.sum()))
        if summed is not None and summed[head]:
            entry = mean_entry(k[one, ~mine], v[one, ~mine])
            held_k, held_v = torch.cat([held_k, entry.k], 1), torch.cat([held_v, entry.v], 1)
            votes = torch.nn.functional.pad(votes, (0, 1), value=entry.log_votes)
        parts.append(Held(held_k, held_v, votes))
    return stacked(parts)


def entries(layers: Sequence[Held], group: int) -> int:
    """Entries of all layers and KV heads, those that only pad left out."""
    return sum(int((layer.votes[::group] > -torch.inf).sum()) for layer in layers)


class Asker:
    """The questions of one sample."""

    def __init__(self, model: Any, sample: CalibrationSample) -> None:
        self.model = model
        self.row: Row = row_of(sample.questions, len(sample.context_ids), model.device)

    def quality(
        self, layers: Sequence[Held] | Callable[[int], Held], refresh: Refresh | None = None
    ) -> Quality:
        """Return how the questions are answered; see `logits`."""
        logits, targets = self.logits(layers, refresh), self.row.targets
        right = logits.argmax(-1) == targets
        answers = [
            right[(self.row.asked >= span.start) & (self.row.asked < span.stop)]
            for span in self.row.spans
        ]
        return Quality(
            recall=float(torch.stack([answer.all() for answer in answers]).float().mean()),
            tokens=float(right.float().mean()),
            loss=float(cross_entropy(logits, targets)),
        )

    @torch.inference_mode()
    def logits(
        self, layers: Sequence[Held] | Callable[[int], Held], refresh: Refresh | None = None
    ) -> Tensor:
        """Float32 `[scored, vocab]` of the answers' tokens, from `layers`, which may be made one at
        a time, or from what `refresh` makes of them."""
        of_layer = layers if callable(layers) else layers.__getitem__

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            if refresh is None:
                return attend_beside(q, k, v, of_layer(layer), self.row.sees, scale)
            parts = []
            for span, prompt in zip(self.row.spans, self.row.prompts, strict=True):
                mine = q[:, :, span]
                held = refresh(layer, newest_queries(mine[:, :, :prompt], k.shape[1], scale))
                own = (k[:, :, span], v[:, :, span])
                parts.append(attend_beside(mine, *own, held, self.row.sees[span, span], scale))
            return torch.cat(parts, dim=2)

        with attending(self.model, attend):
            return self.row.logits(self.model)

"""kvtier's ways to keep a share of a context's bytes: which heads, which tokens, how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.real.held import Held, Refresh, stacked
from kvtier.heads.profile import Head, ModelShape, full_profile
from kvtier.heads.reference.attention import mean_entry
from kvtier.heads.reference.compaction import ScoredSession
from kvtier.heads.samples.questions import CalibrationSample
from kvtier.retention.keepkv import KeepKV, QueryWindow
from kvtier.retention.locality import LocalityRule
from kvtier.retention.refreshing import RefreshRule
from kvtier.retention.scorers import SCORERS, select
from kvtier.retention.scorers.compactor import Compactor


@dataclass(frozen=True)
class Setting:
    """One way to serve.

    heads:    share of the KV heads that are CA
    sink, recent: tokens that every head keeps
    kept:     share of the context's bytes; the CA heads' tokens follow from it
    scorer:   says which tokens those are
    ragged:   whether CA heads share their tokens by score, instead of each having as many
    refresh:  chosen again with the question's own queries
    merge:    what is not kept is merged into what is ("beta"), or dropped (None)
    """

    heads: float
    kept: float
    sink: int = 128
    recent: int = 256
    scorer: str = "distinct-keys"
    ragged: bool = False
    refresh: bool = False
    merge: bool = False

    @property
    def rule(self) -> LocalityRule:
        return LocalityRule(self.sink, self.recent, 0)


class Context:
    """A prefilled context with the exact KV of every head, and its tokens' scores."""

    def __init__(self, model: Any, shape: ModelShape, sample: CalibrationSample) -> None:
        self.model, self.shape, self.num_tokens = model, shape, len(sample.context_ids)
        # The one scorer that looks at the prefill; the others need the keys alone.
        self._session = ScoredSession(
            model, full_profile(shape), LocalityRule(1, 1, 1), scorer=Compactor()
        )
        self._session.turn(sample.context_ids, 0)
        self.kv = [self._session.exact_kv(layer) for layer in range(shape.num_layers)]

    @cache  # noqa: B019  (lives as long as the context)
    def scores(self, scorer: str, layer: int, begin: int, end: int) -> Tensor:
        """Float32 `[kv_heads, end - begin]`, higher = keep."""
        session = self._session
        session.scorer = SCORERS[scorer]()
        heads = range(self.shape.num_kv_heads)
        return session.scores(layer, heads, self.kv[layer][0][:, begin:end], begin)


def tokens_kept(setting: Setting, shape: ModelShape, num_tokens: int) -> int:
    """Tokens of the middle that a CA head keeps so that all heads hold `kept` of the bytes; below
    0 where the locality heads alone hold more."""
    total = shape.num_layers * shape.num_kv_heads
    anchored = num_anchored(setting, shape)
    edges = min(setting.sink + setting.recent, num_tokens)
    # Every head has its edges, every locality head one entry more.
    left = setting.kept * total * num_tokens - total * edges - (total - anchored)
    if setting.merge:
        left -= anchored
    return min(math.floor(left / max(anchored, 1) + 1e-9), num_tokens - edges)


def num_anchored(setting: Setting, shape: ModelShape) -> int:
    return max(1, round(setting.heads * shape.num_layers * shape.num_kv_heads))


class Keeper:
    """One setting over one context."""

    def __init__(self, context: Context, order: Sequence[Head], setting: Setting) -> None:
        self.context, self.setting = context, setting
        shape = context.shape
        self.anchored = set(order[: num_anchored(setting, shape)])
        self.begin, self.end = setting.sink, context.num_tokens - setting.recent
        self.count = tokens_kept(setting, shape, context.num_tokens)
        self._counts = self._ragged() if setting.ragged else {}
        self._rule = RefreshRule(KeepKV(), setting.merge)

    def layers(self) -> list[Held]:
        """What is held before any question."""
        return [self._layer(layer, None) for layer in range(self.context.shape.num_layers)]

    @property
    def refresh(self) -> Refresh | None:
        return self._layer if self.setting.refresh else None

    def _layer(self, layer: int, window: QueryWindow | None) -> Held:
        heads = range(self.context.shape.num_kv_heads)
        return stacked([self._head(layer, head, window) for head in heads])

    def _head(self, layer: int, head: int, window: QueryWindow | None) -> Held:
        k, v = (x[head : head + 1] for x in self.context.kv[layer])
        middle_k, middle_v = k[:, self.begin : self.end], v[:, self.begin : self.end]
        group = self.context.shape.group_size
        if (layer, head) not in self.anchored:
            entry = mean_entry(middle_k, middle_v)
            return self._between(k, v, entry.k, entry.v, k.new_full((group, 1), entry.log_votes))
        count = self._counts.get((layer, head), self.count)
        if count >= middle_k.shape[1]:
            none = k.new_zeros(group, middle_k.shape[1])
            return self._between(k, v, middle_k, middle_v, none)
        if window is not None:
            mine = QueryWindow(window.q[:, head : head + 1], window.scale)
            chosen = self._rule.choose(middle_k, middle_v, count, mine)
            votes = chosen.log_votes
            flat = k.new_zeros(group, chosen.k.shape[1]) if votes is None else votes[0]
            return self._between(k, v, chosen.k, chosen.v, flat)
        scores = self.context.scores(self.setting.scorer, layer, self.begin, self.end)
        mine_scores = scores[head : head + 1]
        if self.setting.merge:
            found = KeepKV().retain(middle_k, middle_v, count, scores=mine_scores)
            parts = (found.entries, found.compensation)
            return self._between(
                k, v,
                torch.cat([part.k for part in parts], dim=1).to(k.dtype),
                torch.cat([part.v for part in parts], dim=1).to(k.dtype),
                torch.cat([part.log_votes.float().expand(-1, group, -1) for part in parts], 2)[0],
            )  # fmt: skip
        kept = select(mine_scores, count)[0]
        return self._between(k, v, middle_k[:, kept], middle_v[:, kept], k.new_zeros(group, count))

    def _between(self, k: Tensor, v: Tensor, mid_k: Tensor, mid_v: Tensor, votes: Tensor) -> Held:
        sides = [
            torch.cat([x[:, : self.begin], mid, x[:, self.end :]], dim=1)
            for x, mid in ((k, mid_k), (v, mid_v))
        ]
        edge = votes.new_zeros(votes.shape[0], 1)
        before, after = self.begin, k.shape[1] - self.end
        votes = torch.cat([edge.expand(-1, before), votes, edge.expand(-1, after)], dim=1)
        return Held(sides[0], sides[1], votes)

    def _ragged(self) -> dict[Head, int]:
        """Tokens of each CA head: those of the best scores over all of them, and a fifth of an even
        share for every one (AdaKV's floor)."""
        middle = self.end - self.begin
        floor = self.count // 5
        heads = sorted(self.anchored)
        scores = torch.stack(
            [
                self.context.scores(self.setting.scorer, layer, self.begin, self.end)[head]
                for layer, head in heads
            ]
        )
        ranked = scores.sort(dim=1, descending=True).values[:, floor:].flatten()
        best = ranked.topk(min((self.count - floor) * len(heads), ranked.numel())).indices
        counts = torch.bincount(best // (middle - floor), minlength=len(heads)) + floor
        return dict(zip(heads, counts.tolist(), strict=True))


__all__ = ["Context", "Keeper", "Setting", "tokens_kept"]

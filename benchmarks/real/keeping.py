"""Ways to keep a share of a context's bytes: which heads, which tokens, how. `kvtier serve` does
all of them but `DUO`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvtier.config.sections import LocalitySettings
from kvtier.heads.probes.held import Held, Refresh, stacked
from kvtier.heads.profile import Head, ModelShape, full_profile
from kvtier.heads.reference.compaction import ScoredSession
from kvtier.heads.reference.rotation import rotation_of
from kvtier.heads.samples.questions import CalibrationSample
from kvtier.retention.head_budgets import adaptive_selection
from kvtier.retention.keepkv import KeepKV, QueryWindow
from kvtier.retention.locality import LocalityRule
from kvtier.retention.refreshing import RefreshRule, reselect
from kvtier.retention.scorers import SCORERS, select
from kvtier.retention.scorers.compactor import Compactor
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.shares import PAGE
from kvtier.retention.token_worth import TokenWorth
from kvtier_kernels.codes import coded_shape, recoded

# The share of CA heads in a setting with a scorer is so many times that of the bytes.
CA_HEADS_PER_BYTE = 1.4
# This rule says which tokens every head keeps where heads compete.
ADAPTIVE_RULE = LocalityRule(**LocalitySettings.COMPETING, compensation=False)
# The setting is DuoAttention's cache (arXiv 2410.10819) with our choice of heads.
DUO = "DuoAttention-like"
# These settings keep codes, of so many bits.
CODED = {"adaptive budgets, 4 bits": 4, "adaptive budgets, 3 bits": 3}


class NoRoomError(ValueError):
    """The error of a setting that keeps more than it may, whatever it drops."""


@dataclass(frozen=True)
class Setting:
    """One way to keep a share of a context's bytes.

    name:     its name in tables
    kept:     share of the context's bytes
    heads:    share of the KV heads that are CA, the others being locality heads; the CA heads'
              tokens follow from `kept`
    sink, recent: tokens that every head keeps; where heads compete, as many recent ones as serving
              keeps of such a context
    scorer:   the scorer of the tokens that CA heads keep; None where they keep all, and `heads`
              follows
    refresh:  whether tokens are chosen again with the question's own queries
    compensation: whether locality heads keep one entry for the tokens that they drop
    merge:    whether tokens that are not kept are merged into those that are, or dropped
    adaptive: whether heads compete for entries, by their tokens' predicted worth
    bits:     bits of the codes that heads keep between their first and last tokens; None where
              these stay as they are
    """

    name: str
    kept: float
    heads: float = 1.0
    sink: int = 64
    recent: int = 64
    scorer: str | None = None
    refresh: bool = False
    compensation: bool = True
    merge: bool = False
    adaptive: bool = False
    bits: int | None = None


def adaptive_setting(
    name: str, kept: float, *, refresh: bool = False, bits: int | None = None
) -> Setting:
    """Return a setting whose heads compete for entries."""
    return Setting(
        name, kept, sink=ADAPTIVE_RULE.sink_tokens, compensation=False, adaptive=True,
        refresh=refresh, bits=bits,
    )  # fmt: skip


def settings_at(kept: float) -> list[Setting]:
    """Return all ways at one share of the bytes."""
    heads = min(1.0, CA_HEADS_PER_BYTE * kept)
    return [
        Setting("head profile", kept, heads=0.0),
        Setting("+ distinct-keys", kept, heads=heads, scorer="distinct-keys"),
        Setting("+ distinct-keys, merged", kept, heads=heads, scorer="distinct-keys", merge=True),
        Setting("+ refresh", kept, heads=heads, scorer="distinct-keys", refresh=True),
        Setting(DUO, kept, heads=0.0, compensation=False),
        adaptive_setting("adaptive budgets", kept),
        adaptive_setting("adaptive budgets + refresh", kept, refresh=True),
        *(adaptive_setting(name, kept, bits=bits) for name, bits in CODED.items()),
    ]


class Kept(NamedTuple):
    """The KV that is held of a context, per layer. refresh: chooses it again for a question;
    used: the number of entries that it counts as; None where that is as many as there are."""

    layers: list[Held]
    refresh: Refresh | None = None
    used: float | None = None


class Context:
    """A prefilled context with the exact KV of every head, and its tokens' scores."""

    def __init__(self, model: Any, shape: ModelShape, sample: CalibrationSample) -> None:
        self.model, self.shape, self.num_tokens = model, shape, len(sample.context_ids)
        # This is the one scorer that looks at the prefill; the others need the keys alone.
        self._session = ScoredSession(
            model, full_profile(shape), LocalityRule(1, 1, 1), scorer=Compactor()
        )
        self._session.turn(sample.context_ids, 0)
        self.nll = self._session.mean_nll()
        self.kv = [self._session.exact_kv(layer) for layer in range(shape.num_layers)]
        # Each setting asks for the same again; what is remembered goes with the context.
        self.worth = cache(self._worth)
        self.scores = cache(self._scores)

    def _worth(self, fitted: TokenWorth) -> Tensor:
        """Return ln of the attention that tokens are expected to draw, `[layers, kv_heads,
        tokens]`."""
        layers = []
        for layer, (k, v) in enumerate(self.kv):
            rotation = rotation_of(self.model, layer, torch.arange(self.num_tokens))
            layers.append(fitted.predict(layer, k, v, rotation))
        return torch.stack(layers)

    def _scores(self, scorer: str, layer: int, begin: int, end: int) -> Tensor:
        """Return the scores of the tokens [begin, end), float32 `[kv_heads, end - begin]`, higher =
        keep."""
        session = self._session
        session.scorer = SCORERS[scorer]()
        heads = range(self.shape.num_kv_heads)
        keys, values = (x[:, begin:end] for x in self.kv[layer])
        return session.scores(layer, heads, keys, values, begin)


class Keeper:
    """One setting over one context.

    order: every KV head, those that need the context most first

    Raises NoRoomError where the setting keeps too much without any choice.
    """

    def __init__(
        self, context: Context, order: Sequence[Head], setting: Setting, fitted: TokenWorth
    ) -> None:
        self.context, self.setting, self.fitted = context, setting, fitted
        recent = ADAPTIVE_RULE.recent(context.num_tokens) if setting.adaptive else setting.recent
        self.begin, self.end = setting.sink, context.num_tokens - recent
        self._rule = RefreshRule(KeepKV(), setting.merge)
        self._feedback = None if setting.bits is None else Reconstruction.of(fitted).feedback()
        if setting.adaptive:
            each = int(setting.kept * context.num_tokens) - setting.sink - recent
            worth = context.worth(fitted)[..., self.begin : self.end]
            self.counts = adaptive_selection(worth.flatten(0, 1), each, self._page)
            self.counts = self.counts.view(worth.shape).sum(-1)
        else:
            self.counts = self._by_profile(order)

    @property
    def _page(self) -> int:
        """Return the number of entries of a page."""
        bits = self.setting.bits
        return PAGE if bits is None else coded_shape(bits, self.context.shape.head_dim).entries

    def kept(self) -> Kept:
        """Return what is held before any question, and how it is chosen again for one."""
        layers = [self._layer(layer, None) for layer in range(self.context.shape.num_layers)]
        used = None
        if self.setting.bits is not None:
            # So many entries would take as much memory.
            edges = self.counts.numel() * (self.context.num_tokens - self.end + self.begin)
            used = edges + PAGE * float((self.counts / self._page).ceil().sum())
        return Kept(layers, self._layer if self.setting.refresh else None, used)

    def _by_profile(self, order: Sequence[Head]) -> Tensor:
        """Return the number of middle tokens that each head keeps, int64 `[layers, kv_heads]`: CA
        heads keep as many as there is room for, locality heads none.

        Raises NoRoomError where the ends alone are more than may be kept.
        """
        setting, shape, tokens = self.setting, self.context.shape, self.context.num_tokens
        total, middle = shape.num_layers * shape.num_kv_heads, self.end - self.begin
        # Every head has its ends and one entry more.
        left = int(setting.kept * total * tokens) - total * (tokens - middle + 1)
        anchored = round(setting.heads * total) if setting.scorer else left // middle
        if anchored < 1 or left < anchored:
            raise NoRoomError(f"{setting.name}: {left} entries for {anchored} heads")
        counts = torch.zeros(shape.num_layers, shape.num_kv_heads, dtype=torch.int64)
        each = min(left // anchored, middle) if setting.scorer else middle
        for layer, head in order[:anchored]:
            counts[layer, head] = each
        return counts

    def _layer(self, layer: int, window: QueryWindow | None) -> Held:
        heads = range(self.context.shape.num_kv_heads)
        return stacked([self._head(layer, head, window) for head in heads])

    def _head(self, layer: int, head: int, window: QueryWindow | None) -> Held:
        k, v = (x[head : head + 1] for x in self.context.kv[layer])
        middle_k, middle_v = k[:, self.begin : self.end], v[:, self.begin : self.end]
        setting, group = self.setting, self.context.shape.group_size
        count = int(self.counts[layer, head])
        if count >= middle_k.shape[1] and setting.bits is None:
            flat = k.new_zeros(group, middle_k.shape[1])
            return self._between(k, v, middle_k, middle_v, flat)
        if setting.merge and count:
            scores = self._scores(layer, head)
            found = KeepKV().retain(middle_k, middle_v, count, scores=scores)
            parts = (found.entries, found.compensation)
            return self._between(
                k, v,
                torch.cat([part.k for part in parts], dim=1).to(k.dtype),
                torch.cat([part.v for part in parts], dim=1).to(k.dtype),
                torch.cat([part.log_votes.float().expand(-1, group, -1) for part in parts], 2)[0],
            )  # fmt: skip
        if window is not None and count:
            mine = QueryWindow(window.q[:, head : head + 1], window.scale)
            if setting.adaptive:
                worth = self._scores(layer, head)[0]
                kept = reselect(KeepKV(), middle_k, middle_v, worth, count, mine)
                kept_k, kept_v = middle_k[:, kept], middle_v[:, kept]
            else:
                chosen = self._rule.choose(middle_k, middle_v, count, mine)
                kept_k, kept_v = chosen.k, chosen.v
        elif count:
            kept = select(self._scores(layer, head), count)[0]
            kept_k, kept_v = middle_k[:, kept], middle_v[:, kept]
        else:
            kept_k, kept_v = middle_k[:, :0], middle_v[:, :0]
        if setting.bits is not None:
            kept_k, kept_v = recoded(kept_k, kept_v, setting.bits, self._fed_back(layer, head))
        votes = k.new_zeros(group, count)
        if setting.compensation and not count:
            # One entry stands for all others: their mean, with as many votes.
            others = middle_k.shape[1] - count
            rest = [
                (every.sum(1, keepdim=True) - kept.sum(1, keepdim=True)) / others
                for every, kept in ((middle_k, kept_k), (middle_v, kept_v))
            ]
            kept_k, kept_v = torch.cat([kept_k, rest[0]], 1), torch.cat([kept_v, rest[1]], 1)
            votes = torch.cat([votes, votes.new_full((group, 1), math.log(others))], 1)
        return self._between(k, v, kept_k, kept_v, votes)

    def _fed_back(self, layer: int, head: int) -> Tensor | None:
        """Return the matrix by which errors of this head's keys are fed back, `[1, dim, dim]`; None
        where there is none."""
        return None if self._feedback is None else self._feedback[layer, head : head + 1]

    def _scores(self, layer: int, head: int) -> Tensor:
        """Return the scores of a head's middle tokens, `[1, tokens]`, higher = keep."""
        if self.setting.adaptive:
            return self.context.worth(self.fitted)[layer, head : head + 1, self.begin : self.end]
        assert self.setting.scorer is not None, "all tokens of a CA head were not kept"
        scores = self.context.scores(self.setting.scorer, layer, self.begin, self.end)
        return scores[head : head + 1]

    def _between(self, k: Tensor, v: Tensor, mid_k: Tensor, mid_v: Tensor, votes: Tensor) -> Held:
        sides = [
            torch.cat([x[:, : self.begin], mid, x[:, self.end :]], dim=1)
            for x, mid in ((k, mid_k), (v, mid_v))
        ]
        before, after = self.begin, k.shape[1] - self.end
        return Held(sides[0], sides[1], torch.nn.functional.pad(votes, (before, after)))

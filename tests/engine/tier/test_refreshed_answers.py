"""Turns that are refreshed from the tier, in the real engine: the tokens are those of a
transformers model that attends to the same entries, which are merged or not.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compressing import competing, demo_model, demo_worth
from engine_process import DEMO_MODEL
from sessions import said_in, side_by_side
from tierd.live_tier import live_tier
from tiered_engine import ENGINE, RULE, run_never_missing
from torch import Tensor

from kvtier.heads.model.config import shape_of
from kvtier.heads.profile import HeadProfile, full_profile, load_profile
from kvtier.heads.reference.rotation import rotation_of
from kvtier.heads.reference.session import ReferenceSession
from kvtier.retention.head_budgets import adaptive_selection
from kvtier.retention.keepkv import KeepKV, QueryWindow
from kvtier.retention.locality import DroppedSpan, LocalityRule
from kvtier.retention.refreshing import RefreshRule
from kvtier.retention.scorers import Span, TokenScorer, select
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.scorers.simple import DistinctKeys
from kvtier.retention.shares import FixedShare, Turn

pytestmark = pytest.mark.engine

LOCALITY = LocalityRule(sink_tokens=32, recent_tokens=64, branch_recent_tokens=24)
SHARE = FixedShare(0.3)
# Longer than any prompt: a turn's queries are those of one pass.
ONE_PASS = 4096


@dataclass
class Entries:
    """The entries of one head: `[n, dim]`, `[n, dim]`, and log-votes that broadcast to
    `[group, n]`."""

    k: Tensor
    v: Tensor
    votes: Tensor


def exact(k: Tensor, v: Tensor) -> Entries:
    return Entries(k, v, torch.zeros(1, k.shape[0]))


@dataclass
class Past:
    """A finished turn. exact: per layer `[heads, tokens, dim]`; span: of its tokens, what is
    chosen from; kept: per layer and head, what is left of the span, None: all of it."""

    start: int
    exact: list[tuple[Tensor, Tensor]]
    span: DroppedSpan
    keep: int
    kept: list[list[Entries]] | None = None

    def middle(self, layer: int) -> tuple[Tensor, Tensor]:
        k, v = self.exact[layer]
        return k[:, self.span.begin : self.span.end], v[:, self.span.begin : self.span.end]

    def edges(self, layer: int, head: int) -> Entries:
        if self.kept is None:
            return exact(*(x[head] for x in self.exact[layer]))
        begin, end = self.span
        return exact(*(torch.cat([x[head, :begin], x[head, end:]]) for x in self.exact[layer]))


class Competing:
    """All heads compete."""

    def __init__(self, scorer: TokenScorer, rule: RefreshRule) -> None:
        self.scorer, self.rule = scorer, rule

    def worth(self, model: Any, past: Past, layer: int) -> Tensor:
        k, v = past.middle(layer)
        first = past.start + past.span.begin
        rotation = rotation_of(model, layer, torch.arange(first, first + k.shape[1]))
        state = torch.empty(k.shape[0], 0, k.shape[1])
        return self.scorer.score(Span(k, state, first, rotation, v, layer))

    def keep(self, model: Any, past: Past) -> list[list[Entries]]:
        layers = range(len(past.exact))
        worth = torch.stack([self.worth(model, past, layer) for layer in layers])
        chosen = adaptive_selection(worth.flatten(0, 1), past.keep).view(worth.shape)
        return [
            [
                exact(k[mine], v[mine])
                for k, v, mine in zip(*past.middle(layer), chosen[layer], strict=True)
            ]
            for layer in layers
        ]

    def again(self, model: Any, past: Past, layer: int, window: QueryWindow) -> list[Entries]:
        assert past.kept is not None
        worth, found = self.worth(model, past, layer), []
        for head, (k, v) in enumerate(zip(*past.middle(layer), strict=True)):
            count = past.kept[layer][head].k.shape[0]
            mine = QueryWindow(window.q[:, head : head + 1], window.scale)
            one = self.rule.choose_by_worth(k[None], v[None], worth[head], count, mine)
            votes = torch.zeros(1, 1, count) if one.log_votes is None else one.log_votes
            found.append(Entries(one.k[0], one.v[0], votes[0]))
        return found


class ByProfile(Competing):
    """Anchored heads keep as many each, the others one entry for all."""

    def __init__(self, profile: HeadProfile, rule: RefreshRule) -> None:
        super().__init__(DistinctKeys(), rule)
        self.profile = profile

    def keep(self, model: Any, past: Past) -> list[list[Entries]]:
        kept = []
        for layer, anchored in enumerate(self.profile.ca_heads):
            k, v = past.middle(layer)
            chosen, heads = select(self.worth(model, past, layer), past.keep), []
            for head in range(k.shape[0]):
                mine = chosen[head]
                mean = Entries(
                    k[head].mean(0, keepdim=True),
                    v[head].mean(0, keepdim=True),
                    torch.full((1, 1), math.log(k.shape[1])),
                )
                heads.append(exact(k[head, mine], v[head, mine]) if head in anchored else mean)
            kept.append(heads)
        return kept

    def again(self, model: Any, past: Past, layer: int, window: QueryWindow) -> list[Entries]:
        assert past.kept is not None
        found, anchored = list(past.kept[layer]), list(self.profile.ca_heads[layer])
        if anchored:
            k, v = (x[anchored] for x in past.middle(layer))
            mine = QueryWindow(window.q[:, anchored], window.scale)
            one = self.rule.choose(k, v, past.keep, mine)
            for index, head in enumerate(anchored):
                votes = one.log_votes
                those = torch.zeros(1, one.k.shape[1]) if votes is None else votes[index]
                found[head] = Entries(one.k[index], one.v[index], those)
        return found


class RefreshedSession(ReferenceSession):
    """A session in which a turn reads entries that were chosen again for it, from the pass over its
    prompt on."""

    def __init__(self, model: Any, policy: Competing) -> None:
        super().__init__(model, full_profile(shape_of(model)), LOCALITY, ONE_PASS)
        self.policy = policy
        self.past: list[Past] = []
        self.fresh: dict[int, tuple[Tensor, Tensor]] = {}
        self.again: dict[int, list[list[Entries] | None]] = {}

    def _choose(self, layer: int, q: Tensor, scale: float) -> list[list[Entries] | None]:
        """q: of the prompt, `[tokens, heads, group, dim]`."""
        window = QueryWindow(q[-self.policy.rule.keepkv.window_queries :], scale)
        return [
            None if past.kept is None else self.policy.again(self.model, past, layer, window)
            for past in self.past
        ]

    def _attend_layer(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        grouped = q[0].unflatten(0, (k.shape[1], -1))
        if layer not in self.again:
            self.again[layer] = self._choose(layer, grouped.permute(2, 0, 1, 3), scale)
        new = (k[0], v[0])
        if layer in self.fresh:
            held = self.fresh[layer]
            new = (torch.cat([held[0], new[0]], 1), torch.cat([held[1], new[1]], 1))
        self.fresh[layer] = new
        out = torch.empty_like(grouped)
        for head in range(k.shape[1]):
            lists = [exact(new[0][head], new[1][head])]
            for past, chosen in zip(self.past, self.again[layer], strict=True):
                lists.append(past.edges(layer, head))
                if chosen is not None:
                    lists.append(chosen[head])
            out[head] = attended(grouped[head], lists, scale)
        return out.view(q.shape)

    def _settle(self, start: int, prompt_stop: int) -> None:
        span = self.rule.dropped(start, self.num_tokens, prompt_stop)
        keep = 0
        if span.num_tokens:
            keep = SHARE.choose(Turn(prompt_stop - start, span.num_tokens)).kept_tokens
        past = Past(start, [self.fresh[layer] for layer in sorted(self.fresh)], span, keep)
        if keep < span.num_tokens:
            past.kept = self.policy.keep(self.model, past)
        self.past.append(past)
        self.fresh, self.again = {}, {}


def attended(q: Tensor, lists: list[Entries], scale: float) -> Tensor:
    """q `[group, rows, dim]` over the lists, of which the first ends in the rows' own entries."""
    rows, own = q.shape[1], lists[0].k.shape[0]
    logits = torch.cat(
        [q @ one.k.T * scale + one.votes[:, None].to(q.dtype) for one in lists], dim=-1
    )
    ahead = torch.ones(rows, own, dtype=torch.bool).triu(own - rows + 1)
    logits[..., :own].masked_fill_(ahead, -torch.inf)
    return logits.softmax(-1) @ torch.cat([one.v for one in lists])


def prompts() -> list[list[list[int]]]:
    """Four turns of each of three sessions."""
    rng = random.Random(31)
    lengths = [[rng.randrange(500, 1200), *(rng.randrange(150, 400) for _ in "abc")] for _ in "abc"]
    return [[[rng.randrange(6, 384) for _ in range(n)] for n in turns] for turns in lengths]


@pytest.mark.parametrize(
    ("kind", "merge"),
    [
        ("profile", "off"),
        ("competing", "off"),
        ("competing", "keepkv"),
        ("profile", "keepkv"),
    ],
)
def test_refreshed_turns_say_what_transformers_says_over_the_same_entries(tmp_path, kind, merge):
    """All sessions' turns at a time, each over what its own queries chose when it began."""
    env = {**RULE, "KVTIER_RETENTION": "0.3", "KVTIER_REFRESH": "turn", "KVTIER_MERGE": merge}
    env["KVTIER_TIER_PATIENCE_S"] = "600"
    rule = RefreshRule(KeepKV(), merges=merge != "off")
    if kind == "competing":
        del env["KVTIER_HEAD_PROFILE"]
        env |= competing(tmp_path)
        policy = Competing(Reconstruction.of(demo_worth()), rule)
    else:
        policy = ByProfile(load_profile(DEMO_MODEL / "head_profile.json"), rule)
    sessions, tokens, expected = prompts(), 12, []
    for turns in sessions:
        session = RefreshedSession(demo_model(), policy)
        expected.append([session.turn(prompt, tokens).token_ids for prompt in turns])
    rounds = side_by_side(sessions, tokens)
    with live_tier(tmp_path, "--memory", "512m") as tier:
        env["KVTIER_TIER"] = tier.address
        engine = {**ENGINE, "chunked_prefill_size": ONE_PASS}
        out = run_never_missing(tmp_path, rounds, env, engine)
    found = out["state"]["tier"]
    assert found["refreshed_turns"] == len(sessions) * (len(rounds) - 1)
    assert said_in(out, len(sessions)) == expected

"""The reference implementation of compaction: CA heads that keep their best tokens of every turn.

What `kvtier.heads.reference.session` is for the head split, this is for token scorers: a prefill
that remembers what the scorer wants to see, and a session whose CA heads keep a share of every
finished turn. Curves are calibrated with it, and the engine's tokens are compared with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvtier.heads.model.config import shape_of
from kvtier.heads.profile import HeadProfile, full_profile
from kvtier.heads.reference.attention import Block, joined
from kvtier.heads.reference.rotation import rotation_of, turned_keys
from kvtier.heads.reference.session import (
    CHUNK_TOKENS,
    DEFAULT_RULE,
    ClassCache,
    ReferenceSession,
)
from kvtier.retention.head_budgets import adaptive_selection
from kvtier.retention.locality import LEAST_PART, DroppedSpan, LocalityRule
from kvtier.retention.scorers import Chunk, Span, TokenScorer, select
from kvtier.retention.scorers.simple import DistinctKeys
from kvtier.retention.shares import PAGE, whole_pages
from kvtier_kernels.codes import coded_shape, recoded

NLL_STRIDE = 4

KeepCount = Callable[[int, int], int]
"""(prompt tokens of the turn, droppable ones among them) -> how many of those to keep."""


class ScoredSession(ReferenceSession):
    """A reference session that remembers, of the turn under way, what its scorer asks for.

    state: per layer, chunks of float32 `[kv_heads, state_width, tokens]`; see TokenScorer
    nll:  of every `nll_stride`-th prompt token's successor, nats
    """

    def __init__(
        self,
        model: Any,
        profile: HeadProfile,
        rule: LocalityRule = DEFAULT_RULE,
        chunk_tokens: int = CHUNK_TOKENS,
        scorer: TokenScorer | None = None,
        nll_stride: int = NLL_STRIDE,
        *,
        kv_dtype: torch.dtype | None = None,
        in_pages: bool = False,
    ) -> None:
        super().__init__(model, profile, rule, chunk_tokens, kv_dtype=kv_dtype, in_pages=in_pages)
        self.scorer = scorer or DistinctKeys()
        self.nll_stride = nll_stride
        self.state: list[list[Tensor]] = [[] for _ in range(profile.shape.num_layers)]
        self.nll: list[Tensor] = []
        self.turn_start = 0

    def _attend_layer(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        tokens = q.shape[2]
        grouped = q[0].unflatten(0, (k.shape[1], -1)).permute(2, 0, 1, 3)
        start = self.num_tokens - tokens
        if self.scorer.state_width:
            keys, values = k[0].transpose(0, 1), v[0].transpose(0, 1)
            chunk = Chunk(grouped, keys, values, [0, tokens], [start], scale)
            self.state[layer].append(self.scorer.observe(chunk))
        return super()._attend_layer(layer, q, k, v, scale)

    def _forward(self, token_ids: list[int]) -> Tensor:
        """Run the model as the base does, asking sampled positions for their successor on the
        way."""
        first, self.num_tokens = self.num_tokens, self.num_tokens + len(token_ids)
        last = len(token_ids) - 1
        asked = torch.arange(min(-first % self.nll_stride, last), last, self.nll_stride)
        rows = torch.cat([asked, torch.tensor([last])]).to(self.model.device)
        ids = torch.tensor([token_ids], device=self.model.device)
        positions = torch.arange(first, self.num_tokens, device=self.model.device)[None]
        output = self.model(ids, position_ids=positions, use_cache=False, logits_to_keep=rows)
        logits = output.logits[0].float()
        if asked.numel():
            successors = ids[0, rows[:-1] + 1]
            losses = torch.nn.functional.cross_entropy(logits[:-1], successors, reduction="none")
            self.nll.append(losses)
        return logits[-1]

    def mean_nll(self) -> float:
        """Return the mean NLL of the turn under way, nats per token; NaN when nothing was asked."""
        return float(torch.cat(self.nll).double().mean()) if self.nll else float("nan")

    def scores(
        self, layer: int, heads: Sequence[int], keys: Tensor, values: Tensor, first: int
    ) -> Tensor:
        """Scores `[heads, tokens]` of some of the turn's tokens, higher = keep.

        keys, values: `[heads, tokens, dim]` of those heads and tokens, keys rotated
        first:        offset of the first token in the turn
        """
        tokens = keys.shape[1]
        if self.scorer.state_width:
            state = torch.cat(self.state[layer], dim=2)[list(heads), :, first : first + tokens]
        else:
            state = keys.new_empty(keys.shape[0], 0, tokens, dtype=torch.float32)
        position = self.turn_start + first
        positions = torch.arange(position, position + tokens, device=keys.device)
        rotation = rotation_of(self.model, layer, positions)
        return self.scorer.score(Span(keys, state, position, rotation, values, layer))

    def forget(self) -> None:
        """Start a new turn."""
        self.state = [[] for _ in self.state]
        self.nll = []
        self.turn_start = self.num_tokens


class CompactingSession(ScoredSession):
    """A session whose CA heads keep `keep_count` entries of what locality heads drop."""

    keep_count: KeepCount

    def _kept_of(self, prompt_tokens: int, span: DroppedSpan) -> int:
        return self.keep_count(prompt_tokens, span.num_tokens) if span.num_tokens else 0

    def _settle(self, start: int, prompt_stop: int) -> None:
        span = self._dropped(start, prompt_stop)
        if span.num_tokens:
            keep = self._kept_of(prompt_stop - start, span)
            for layer, cache in enumerate(self._anchored):
                if cache.heads and keep < span.num_tokens:
                    k, v = joined(cache.fresh)
                    middle = [x[:, span.begin : span.end] for x in (k, v)]
                    scores = self.scores(layer, cache.heads, middle[0], middle[1], span.begin)
                    chosen = select(scores, keep) + span.begin
                    cache.fresh = [_with_chosen(k, v, span.begin, span.end, chosen)]
        super()._settle(start, prompt_stop)
        self.forget()


class AdaptiveSession(ScoredSession):
    """A session whose heads compete for entries: all heads together keep `keep_count` times their
    number of what locality heads would drop, each as many as are among the best of all
    (kvtier.retention.head_budgets). The scorer is `comparable`, and every head is CA.

    ranks: tensor parallel ranks of the server that this is the reference of. The heads of a rank
    compete with each other. bits: of the codes that kept entries are (kvtier_kernels.codes); None
    where they stay as they are. streams: whether a prompt is compressed while it is prefilled:
    whenever a chunk is computed that is not the last, those before it keep their share.
    """

    keep_count: KeepCount
    streams: bool = False

    def __init__(
        self,
        model: Any,
        rule: LocalityRule = DEFAULT_RULE,
        chunk_tokens: int = CHUNK_TOKENS,
        scorer: TokenScorer | None = None,
        *,
        kv_dtype: torch.dtype | None = None,
        ranks: int = 1,
        bits: int | None = None,
    ) -> None:
        shape = shape_of(model)
        self.bits = bits
        self._page = PAGE if bits is None else coded_shape(bits, shape.head_dim).entries
        self._held = [shape.kv_heads_of_rank(rank, ranks) for rank in range(ranks)]
        super().__init__(model, full_profile(shape), rule, chunk_tokens, scorer, kv_dtype=kv_dtype)
        layers, heads = range(shape.num_layers), range(shape.num_kv_heads)
        self._by_head = [[ClassCache((head,), kv_dtype) for head in heads] for _ in layers]
        self._feedback = None if bits is None else self.scorer.feedback()
        # The positions of every block whose entries are coded.
        self.coded: list[range] = []
        self._full = [index for index, window in enumerate(self.windows) if window is None]
        # Behind this place nothing was computed over everything any more; None: there is no such
        # place.
        self._exact_stop: int | None = None

    def cut(self, at: int) -> AdaptiveSession:
        """An independent session that has what this one keeps of its first `at` tokens: what a
        request reads that leaves this one's context at that position, or a window behind it."""
        if self.bits is not None:
            self._code_anew(at)
        other = copy.copy(self)
        other.num_tokens, other._pending, other._window_kv = at, [], {}
        used = self._blocks_of(0, at)
        other.coded = [range(self.coded[i].start, min(self.coded[i].stop, at)) for i in used]

        def first(cache: ClassCache) -> ClassCache:
            # Caches of layers with a window have no blocks.
            kept = [cache.settled[i].between(0, at) for i in used if cache.settled]
            return ClassCache(cache.heads, cache.dtype, kept)

        other._by_head = [[first(cache) for cache in layer] for layer in self._by_head]
        other.forget()
        return other

    def _blocks_of(self, begin: int, stop: int) -> list[int]:
        """Blocks in which any head has something of the positions from `begin` to `stop`."""
        return [
            index
            for index in range(len(self.coded))
            if any(
                cache.settled[index].between(begin, stop).k.numel()
                for layer in self._full
                for cache in self._by_head[layer]
            )
        ]

    def _code_anew(self, at: int) -> None:
        """Make two blocks of that whose coded entries are on both sides of a cut: those behind it
        begin in the middle of pages, and are coded anew."""
        index = next((i for i, one in enumerate(self.coded) if one.start < at < one.stop), None)
        if index is None:
            return
        coded = self.coded[index]
        self.coded[index : index + 1] = [range(coded.start, at), range(at, coded.stop)]
        for layer in self._full:
            for head, cache in enumerate(self._by_head[layer]):
                block = cache.settled[index]
                rest = block.between(at, self.num_tokens)
                rest = self._recoded(rest, self.coded[index + 1], layer, head)
                cache.settled[index : index + 1] = [block.between(0, at), rest]

    def compute(self, token_ids: Sequence[int]) -> None:
        """Go on with tokens of a request whose turn has not ended, all of which stay as they are.
        Between turns only."""
        keep_count, bits = self.keep_count, self.bits
        # Codes would take less room than even everything has.
        self.keep_count, self.bits = lambda prompt, droppable: droppable, None
        self.turn(token_ids, 0)
        self.keep_count, self.bits = keep_count, bits

    def take(self, other: AdaptiveSession, begin: int, stop: int) -> None:
        """Go on with what another session keeps of its tokens from `begin` to `stop`, their keys
        turned to where they stand in this one. Between turns only."""
        shift = self.num_tokens - begin
        used = other._blocks_of(begin, stop)
        for layer in self._full:
            for head, cache in enumerate(self._by_head[layer]):
                for i in used:
                    block = other._by_head[layer][head].settled[i].between(begin, stop)
                    k = cache.rounded(turned_keys(self.model, layer, block.k, shift))
                    block = block._replace(k=k)
                    if self.bits is not None and (shift or begin > other.coded[i].start):
                        block = self._recoded(block, other.coded[i], layer, head)
                    assert block.at is not None, "a block without positions"
                    cache.settled.append(block._replace(at=block.at + shift))
        for coded in (other.coded[i] for i in used):
            first, last = (min(max(at, begin), stop) for at in (coded.start, coded.stop))
            self.coded.append(range(first + shift, last + shift))
        self.num_tokens += stop - begin
        self.forget()

    def kv_of_heads(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each head's entries, `[1, entries, dim]` each, between turns."""
        return [joined(cache.settled) for cache in self._by_head[layer]]

    def _caches(self, layer: int) -> Sequence[ClassCache]:
        return self._by_head[layer]

    def _prefill(self, prompt: list[int]) -> Tensor:
        step = self.chunk_tokens
        for begin in range(0, len(prompt), step):
            before = self.num_tokens
            logits = self._forward(prompt[begin : begin + step])
            if self.streams and 0 < begin < len(prompt) - step - 1:
                start = self.turn_start
                self._settle_until(before, self.rule.dropped_chunk(start, before), before - start)
        return logits

    def _settle(self, start: int, prompt_stop: int) -> None:
        # A beginning that was streamed is settled already.
        begin = self.turn_start
        if self.rule.window:
            self._settle_before(max(0, prompt_stop - self.rule.window))
            return
        span = self.rule.dropped(begin, self.num_tokens, prompt_stop)
        self._settle_until(self.num_tokens, span, prompt_stop - begin)

    def _settle_before(self, stop: int) -> None:
        """Compress the tokens before the newest window, those that were computed over everything
        by themselves."""
        exact_stop = self._exact_stop or self.num_tokens
        for end in (min(stop, exact_stop), stop):
            begin = self.turn_start
            if end - begin >= LEAST_PART or begin < end == exact_stop:
                span = self.rule.dropped_chunk(begin, end)
                self._settle_until(end, span, end - begin)
                self._exact_stop = exact_stop

    def _settle_until(self, stop: int, span: DroppedSpan, prompt_tokens: int) -> None:
        """Compress the tokens from `turn_start` to `stop`, of which heads keep a part of `span`."""
        start = self.turn_start
        keep = self.keep_count(prompt_tokens, span.num_tokens) if span.num_tokens else 0
        tokens = stop - start
        every = [[joined(cache.fresh) for cache in self._by_head[at]] for at in self._full]
        fresh = [[(k[:, :tokens], v[:, :tokens]) for k, v in layer] for layer in every]
        kept: Tensor | None = None
        taken = keep
        if self.bits is not None:
            # Even everything may take less room than it has.
            keep = whole_pages(keep, span.num_tokens, self._page)
            taken = PAGE * -(-keep // self._page)
        if self.rule.window:
            # Pages are in bundles over all layers.
            layers, full = len(self.windows), len(self._full)
            pages = -(-whole_pages(keep, span.num_tokens, self._page) // self._page)
            bundles = -(-pages * full // layers)
            taken = PAGE * bundles
            keep = min(self._page * (bundles * layers // full), span.num_tokens)
        if taken < span.num_tokens:
            scores = []
            for index, parts in zip(self._full, fresh, strict=True):
                k, v = (torch.cat(x)[:, span.begin : span.end] for x in zip(*parts, strict=True))
                scores.append(self.scores(index, range(len(parts)), k, v, span.begin))
            worth = torch.stack(scores)
            kept = torch.zeros_like(worth, dtype=torch.bool)
            for held in self._held:
                mine = worth[:, held.start : held.stop]
                chosen = adaptive_selection(mine.flatten(0, 1), keep, self._page)
                kept[:, held.start : held.stop] = chosen.view(mine.shape)
        coded = range(start, start)
        if kept is not None and self.bits is not None:
            coded = range(start + span.begin, start + span.end)
        for index, layer in enumerate(self._full):
            for head, cache in enumerate(self._by_head[layer]):
                stays = torch.ones(tokens, dtype=torch.bool)
                if kept is not None:
                    stays[span.begin : span.end] = kept[index, head]
                k, v = (side[:, stays] for side in fresh[index][head])
                block = Block(k, v, at=start + torch.nonzero(stays).squeeze(-1))
                cache.settled.append(self._recoded(block, coded, layer, head) if coded else block)
                k, v = (side[:, tokens:] for side in every[index][head])
                cache.fresh = [Block(k, v)] if k.shape[1] else []
        # A scorer whose scores compare remembers nothing of the prefill that would be kept here.
        self.coded.append(coded)
        self.forget()
        self.turn_start = stop

    def _recoded(self, block: Block, coded: range, layer: int, head: int) -> Block:
        """One head's entries, those of the positions that are `coded` as their codes have them."""
        assert self.bits is not None, "entries that stay as they are"
        assert block.at is not None, "a block without positions"
        k, v = block.k.clone(), block.v.clone()
        those = (coded.start <= block.at) & (block.at < coded.stop)
        fed_back = None if self._feedback is None else self._feedback[layer, head : head + 1]
        k[:, those], v[:, those] = recoded(k[:, those], v[:, those], self.bits, fed_back)
        return block._replace(k=k, v=v)


def _with_chosen(k: Tensor, v: Tensor, begin: int, end: int, chosen: Tensor) -> Block:
    """The turn's KV with only `chosen` `[heads, keep]` of [begin, end) left."""
    own = chosen.unsqueeze(-1).expand(-1, -1, k.shape[-1])
    parts = [torch.cat([t[:, :begin], t.gather(1, own), t[:, end:]], dim=1) for t in (k, v)]
    return Block(parts[0], parts[1])

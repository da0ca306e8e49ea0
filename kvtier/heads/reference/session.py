"""The reference implementation: what kvtier's engine does, said simply, on a transformers model.

A session is turns.  A turn attends exactly to its own tokens and to what earlier turns left; when
it ends, its node is compressed:

    node          start                                        prompt_stop        stop
    CA head         | k k k k k k k k k k k k k k k k k k k k k k k | k k k k k k k |
    locality head   | sink |       one entry, N votes      | recent | k k k k k k k |

The one entry is `(mean k, mean v)` of the N dropped rotated keys and values with `ln N` added to
its logit (RazorAttention's compensation token).  Positions stay logical: keys are stored rotated.

Calibration measures with it, and the engine's tokens are compared with its own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvtier.errors import UsageError
from kvtier.heads.model.config import layer_sinks, layer_windows, shape_of
from kvtier.heads.profile import HeadProfile
from kvtier.heads.reference.attention import (
    AttentionState,
    Block,
    attend,
    attend_own,
    attend_window,
    attending,
    joined,
    mean_entry,
    with_sinks,
)
from kvtier.retention.locality import DroppedSpan, LocalityRule
from kvtier.retention.shares import profile_slots

DEFAULT_RULE = LocalityRule(sink_tokens=128, recent_tokens=256, branch_recent_tokens=128)
CHUNK_TOKENS = 2048
COALESCE_TOKENS = 4096


@dataclass
class ClassCache:
    """KV of the CA heads or of the locality heads of one layer: `settled` from earlier turns,
    `fresh` from this one.

    heads: ascending KV head indices. dtype: what KV is rounded to, computed with as before; None:
    not at all. Blocks are never changed in place, so forks share them.
    """

    heads: tuple[int, ...]
    dtype: torch.dtype | None = None
    settled: list[Block] = field(default_factory=list)
    fresh: list[Block] = field(default_factory=list)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """New tokens over everything held and themselves (shapes as in `attend_own`, `with_sinks`),
        then hold them too."""
        # States are merged in float32, whatever the model computes in.
        state = with_sinks(self.attend_state(q, k, v, scale), sinks)
        return state.out.reshape(q.shape).to(q.dtype)

    def attend_state(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> AttentionState:
        """Attend as `attend` does, and return the log-sum-exp, too; rows as in `attend_own`."""
        k, v = self.rounded(k), self.rounded(v)
        state = attend_own(q, k, v, scale)
        rows = q.flatten(1, 2)
        for block in (*self.settled, *self.fresh):
            if block.k.shape[1]:
                state = state.merge(attend(rows, block, scale))
        _push(self.fresh, Block(k, v))
        return state

    def settle(self, begin: int, end: int, compensation: bool) -> None:
        """End the turn; entries [begin, end) of the fresh ones are dropped."""
        k, v = joined(self.fresh)
        self.fresh = []
        if end > begin:
            if compensation:
                mean = mean_entry(k[:, begin:end], v[:, begin:end])
                rounded = self.rounded(mean.k), self.rounded(mean.v)
                self.settled.append(Block(*rounded, mean.log_votes))
            k, v = (torch.cat([t[:, :begin], t[:, end:]], dim=1) for t in (k, v))
        _push(self.settled, Block(k, v))

    def rounded(self, x: Tensor) -> Tensor:
        """Return x rounded as it is stored."""
        if self.dtype is None or self.dtype == x.dtype:
            return x
        largest = torch.finfo(self.dtype).max
        return x.clamp(-largest, largest).to(self.dtype).to(x.dtype)

    @property
    def num_entries(self) -> int:
        """Entries held per head, compensation entries included."""
        return sum(block.k.shape[1] for block in (*self.settled, *self.fresh))


def _push(blocks: list[Block], block: Block) -> None:
    """Append, growing a short last block instead of making many."""
    last = blocks[-1] if blocks else None
    if last is None or last.log_votes or last.k.shape[1] >= COALESCE_TOKENS:
        blocks.append(block)
    else:
        blocks[-1] = Block(*joined([last, block]))


class TurnResult(NamedTuple):
    """Greedy tokens of a turn and the log-probability the model gave each."""

    token_ids: list[int]
    logprobs: list[float]


class ReferenceSession:
    """One session under a head profile, run with a transformers causal LM; batch size 1.

    The session owns its KV and borrows the model. `fork` is cheap: KV is shared until it differs.
    """

    def __init__(
        self,
        model: Any,
        profile: HeadProfile,
        rule: LocalityRule = DEFAULT_RULE,
        chunk_tokens: int = CHUNK_TOKENS,
        *,
        kv_dtype: torch.dtype | None = None,
        in_pages: bool = False,
    ) -> None:
        """kv_dtype: of the KV cache that is imitated, such as fp8; None: the model's own. in_pages:
        as the engine, which holds what stays in pages, keep a span whole that saves no slots.

        Raises HeadProfileMismatchError when the profile is for another shape of model.
        """
        profile.check_fits(shape_of(model))
        self.model = model
        self.rule = rule
        self.in_pages = in_pages
        self.chunk_tokens = chunk_tokens
        self.num_tokens = 0
        self._pending: list[int] = []
        self.windows = layer_windows(model)
        self._sinks = layer_sinks(model)
        # KV of layers with a window, of all tokens; what left the window nobody sees.
        self._window_kv: dict[int, tuple[Tensor, Tensor]] = {}
        self._anchored = [ClassCache(heads, kv_dtype) for heads in profile.ca_heads]
        layers = range(profile.shape.num_layers)
        self._local = [ClassCache(profile.locality_heads(layer), kv_dtype) for layer in layers]
        self._num_heads = profile.num_ca_heads, len(self._local) * profile.shape.num_kv_heads

    def fork(self) -> ReferenceSession:
        """An independent session with the same past."""
        other = copy.copy(self)
        other._pending = list(self._pending)
        other._window_kv = dict(self._window_kv)
        for name in ("_anchored", "_local"):
            caches = [ClassCache(c.heads, c.dtype, list(c.settled)) for c in getattr(self, name)]
            setattr(other, name, caches)
        return other

    def retained(self, layer: int) -> dict[int, int]:
        """KV entries that each KV head of `layer` holds."""
        return {head: cache.num_entries for cache in self._caches(layer) for head in cache.heads}

    def _caches(self, layer: int) -> Sequence[ClassCache]:
        """Return the caches that hold the KV of a layer."""
        return self._anchored[layer], self._local[layer]

    def exact_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """The CA heads' rotated keys and values, `[ca_heads, num_tokens, dim]` each; all heads' of
        a layer with a window."""
        if layer in self._window_kv:
            return self._window_kv[layer]
        return joined(self._anchored[layer].settled)

    @torch.inference_mode()
    def turn(
        self, prompt_ids: Sequence[int], max_new_tokens: int, eos: int | None = None
    ) -> TurnResult:
        """Prefill `prompt_ids`, decode greedily up to and including `eos`, compress the node.

        The last sampled token has no KV yet; it becomes the first token of the next turn's prompt.
        An `eos` before `max_new_tokens` has: SGLang computes ahead, and learns of it one step late.
        With `max_new_tokens=0` the prompt alone is the turn. Raises UsageError without a prompt.
        """
        if not prompt_ids:
            raise UsageError("prompt_ids", "at least one token", [])
        start, prompt = self.num_tokens, [*self._pending, *map(int, prompt_ids)]
        result, self._pending = TurnResult([], []), []
        with attending(self.model, self._attend, varied=True):
            logits = self._prefill(prompt)
            while len(result.token_ids) < max_new_tokens:
                token = int(logits.argmax())
                result.token_ids.append(token)
                result.logprobs.append(float(torch.log_softmax(logits, -1)[token]))
                if len(result.token_ids) == max_new_tokens:
                    self._pending = [token]
                    break
                logits = self._forward([token])
                if token == eos:
                    break
        self._settle(start, start + len(prompt))
        return result

    def _prefill(self, prompt: list[int]) -> Tensor:
        step = self.chunk_tokens
        for begin in range(0, len(prompt), step):
            logits = self._forward(prompt[begin : begin + step])
        return logits

    def _forward(self, token_ids: list[int]) -> Tensor:
        """Logits `[vocab]` float32 after the last of `token_ids`."""
        device = self.model.device
        ids = torch.tensor([token_ids], device=device)
        first, self.num_tokens = self.num_tokens, self.num_tokens + len(token_ids)
        positions = torch.arange(first, self.num_tokens, device=device)[None]
        output = self.model(ids, position_ids=positions, use_cache=False, logits_to_keep=1)
        return output.logits[0, -1].float()

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        window = self.windows[layer]
        if window is None:
            return self._attend_layer(layer, q, k, v, scale)
        k, v = (self._anchored[layer].rounded(x[0]) for x in (k, v))
        if layer in self._window_kv:
            k, v = (torch.cat(x, 1) for x in zip(self._window_kv[layer], (k, v), strict=True))
        self._window_kv[layer] = k, v
        grouped = q[0].unflatten(0, (k.shape[0], -1))
        sinks = self._sinks.get(layer)
        return attend_window(grouped, k, v, window, scale, sinks).reshape(q.shape)

    def _attend_layer(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """A layer that attends to everything."""
        grouped = q[0].unflatten(0, (k.shape[1], -1))
        out, sinks = torch.empty_like(grouped), self._sinks.get(layer)
        for cache in self._caches(layer):
            if cache.heads:
                heads = list(cache.heads)
                theirs = None if sinks is None else sinks[heads]
                out[heads] = cache.attend(grouped[heads], k[0, heads], v[0, heads], scale, theirs)
        return out.view(q.shape)

    def _dropped(self, start: int, prompt_stop: int) -> DroppedSpan:
        """Return the span that the turn drops."""
        span = self.rule.dropped(start, self.num_tokens, prompt_stop)
        keep, tokens = self._kept_of(prompt_stop - start, span), span.num_tokens
        if self.in_pages and profile_slots(keep, *self._num_heads) >= tokens:
            return DroppedSpan(0, 0)
        return span

    def _kept_of(self, prompt_tokens: int, span: DroppedSpan) -> int:
        """Return the number of entries of a span that anchored heads keep."""
        return span.num_tokens

    def _settle(self, start: int, prompt_stop: int) -> None:
        span = self._dropped(start, prompt_stop)
        every = zip(self.windows, self._anchored, self._local, strict=True)
        for window, anchored, local in every:
            if window is not None:
                continue
            if anchored.heads:
                anchored.settle(0, 0, compensation=False)
            if local.heads:
                local.settle(span.begin, span.end, self.rule.compensation)

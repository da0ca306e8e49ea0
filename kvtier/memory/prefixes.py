"""Ways to hold a prefix, as the reference attends to them: exact KV, some of it, a memory, nothing.

    request's tokens ── their own KV, causally ──┐
                  └──── what is held of the prefix ──⊕──> attention's output

Shares no code with the engine: its answers are compared with these. Float32, one request at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvtier.heads.reference.attention import AttentionState, Block, attend, attending
from kvtier.heads.reference.rotation import rotation_of
from kvtier.heads.reference.session import ClassCache
from kvtier_kernels.memory.base import MemoryLayer, lookup_keys, project
from kvtier_kernels.scores import Rotation, unrotate

LayerKV = tuple[Tensor, Tensor]
"""Rotated keys and values of a layer, `[kv_heads, tokens, dim]` each."""


@dataclass(frozen=True)
class Asked:
    """New tokens that look at the prefix, in one layer.

    q:        `[kv_heads, group, tokens, dim]`, rotated
    rotation: of their positions; None: q is not rotated
    behind:   int64 `[tokens]`, how far behind the prefix's end they stand
    scale:    multiplies q.k
    """

    q: Tensor
    rotation: Rotation | None
    behind: Tensor
    scale: float

    @property
    def unrotated(self) -> Tensor:
        """`[tokens, kv_heads, group, dim]`, as the projection gave them."""
        plain = self.q
        if self.rotation is not None:
            cos, sin, interleaved = self.rotation
            plain = unrotate(plain.flatten(0, 1), cos, sin, interleaved=interleaved)
        return plain.view(self.q.shape).permute(2, 0, 1, 3)


class Prefix(ABC):
    """Something that is held of a prefix."""

    @abstractmethod
    def state(self, layer: int, asked: Asked) -> AttentionState | None:
        """The attention of new tokens over it: rows as in `attend_own`; None: over nothing."""


class NoPrefix(Prefix):
    """A prefix of which nothing is held."""

    def state(self, layer: int, asked: Asked) -> AttentionState | None:
        return None


@dataclass(frozen=True)
class ExactPrefix(Prefix):
    """A prefix whose KV is held, or as much of it as all heads of a layer keep."""

    kv: Sequence[LayerKV]

    def state(self, layer: int, asked: Asked) -> AttentionState | None:
        return attend(asked.q.flatten(1, 2), Block(*self.kv[layer]), asked.scale)


@dataclass(frozen=True)
class KeptPrefix(Prefix):
    """A prefix of which some KV is held. kept: per layer and KV head, which tokens, int64
    ascending."""

    kv: Sequence[LayerKV]
    kept: Sequence[Sequence[Tensor]]

    def state(self, layer: int, asked: Asked) -> AttentionState | None:
        k, v = self.kv[layer]
        parts = [
            attend_some(asked.q[head], k[head, mine], v[head, mine], asked.scale)
            for head, mine in enumerate(self.kept[layer])
        ]
        return AttentionState(*(torch.cat(side) for side in zip(*parts, strict=True)))


@dataclass
class MemoryPrefix(Prefix):
    """A memory of one prefix: layers of N = 1. gated: whether queries that no entry is near to get
    the kept KV; else they get the nearest entry, whatever it is.

    fell: of every pass and layer that looked up so far, bool `[tokens]`, which queries fell back
    """

    layers: Sequence[MemoryLayer]
    gated: bool = True
    fell: list[Tensor] = field(default_factory=list, compare=False, repr=False)

    def fell_back(self, tokens: int) -> float:
        """The share of lookups that fell back, of the first so many tokens of the passes so far."""
        if not self.fell:
            return 0.0
        return float(torch.stack([layer[:tokens].float().mean() for layer in self.fell]).mean())

    def state(self, layer: int, asked: Asked) -> AttentionState | None:
        memory = self.layers[layer]
        kv_heads, group, tokens, _ = asked.q.shape
        entry, near = self._nearest(memory, asked)
        parts = []
        for head in range(kv_heads):
            begin, end = (int(n) for n in memory.kept_indptr[head : head + 2])
            kept = attend_some(
                asked.q[head], memory.kept_k[begin:end], memory.kept_v[begin:end], asked.scale
            )
            if bool(memory.looks_up[0, head]) and entry is not None:
                found = AttentionState(
                    memory.o[entry, head].transpose(0, 1).reshape(1, group * tokens, -1),
                    memory.lse[entry, head].T.reshape(1, -1),
                )
                answered = near.repeat(group)[None]
                kept = AttentionState(
                    torch.where(answered.unsqueeze(-1), found.out, kept.out),
                    torch.where(answered, found.lse, kept.lse),
                )
            parts.append(kept)
        return AttentionState(*(torch.cat(side) for side in zip(*parts, strict=True)))

    def _nearest(self, memory: MemoryLayer, asked: Asked) -> tuple[Tensor | None, Tensor]:
        """Each token's entry, and whether it is near enough."""
        tokens = asked.q.shape[2]
        if not len(memory.keys):
            return None, torch.zeros(tokens, dtype=torch.bool)
        x = project(asked.unrotated, memory.projection)[:, 0]
        keys = lookup_keys(x, asked.behind, memory.place_weight[0])
        cosine, entry = (keys @ memory.keys.float().T).max(-1)
        near = cosine >= memory.nearness[0] if self.gated else torch.ones_like(cosine).bool()
        self.fell.append(~near)
        return entry, near


def attend_some(q: Tensor, k: Tensor, v: Tensor, scale: float) -> AttentionState:
    """One KV head's queries `[group, tokens, dim]` over some KV `[n, dim]`, perhaps none; the state
    has one head and its rows."""
    rows = q.flatten(0, 1)
    if not len(k):
        nothing = torch.full((1, len(rows)), -torch.inf, device=q.device)
        return AttentionState(torch.zeros_like(rows)[None], nothing)
    return attend(rows[None], Block(k.to(q.dtype)[None], v.to(q.dtype)[None]), scale)


def reading(
    model: Any, prefix: Prefix, length: int, own: OwnKV | None = None
) -> AbstractContextManager[None]:
    """Return a context in which the model reads a request's tokens behind a prefix of so many
    tokens.

    own: the KV of the request so far, where it comes in several passes.
    """
    held = OwnKV() if own is None else own

    def attend_layer(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        grouped = q[0].view(k.shape[1], -1, *q.shape[2:])
        cache = held.of_layer(layer, k.shape[1])
        begin = length + cache.num_entries
        positions = torch.arange(begin, begin + q.shape[2], device=q.device)
        state = cache.attend_state(grouped, k[0], v[0], scale)
        rotation = rotation_of(model, layer, positions)
        found = prefix.state(layer, Asked(grouped, rotation, positions - length, scale))
        if found is not None:
            state = state.merge(found)
        return state.out.reshape(q.shape)

    return attending(model, attend_layer)


class OwnKV:
    """The KV of a request behind a prefix, layer by layer. dtype: of the KV cache that is imitated,
    such as fp8; None: the model's own."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._caches: dict[int, ClassCache] = {}

    def of_layer(self, layer: int, heads: int) -> ClassCache:
        """The cache of a layer, which has so many KV heads."""
        if layer not in self._caches:
            self._caches[layer] = ClassCache(tuple(range(heads)), self._dtype)
        return self._caches[layer]

    @property
    def num_tokens(self) -> int:
        """The number of the request's tokens that have been read."""
        return max((cache.num_entries for cache in self._caches.values()), default=0)


@torch.inference_mode()
def logits_behind(
    model: Any, prefix: Prefix, length: int, ids: Sequence[int], own: OwnKV | None = None
) -> Tensor:
    """Logits `[tokens, vocab]` float32 of a request's tokens behind a prefix of so many."""
    held = OwnKV() if own is None else own
    first = length + held.num_tokens
    positions = torch.arange(first, first + len(ids), device=model.device)[None]
    with reading(model, prefix, length, held):
        output = model(
            torch.tensor([list(ids)], device=model.device), position_ids=positions, use_cache=False
        )
    found: Tensor = output.logits[0].float()
    return found


def generate_behind(
    model: Any,
    prefix: Prefix,
    length: int,
    prompt_ids: Sequence[int],
    new_tokens: int,
    kv_dtype: torch.dtype | None = None,
) -> list[int]:
    """Greedy tokens behind a prefix of so many. kv_dtype: as in `OwnKV`."""
    own, answer = OwnKV(kv_dtype), list[int]()
    logits = logits_behind(model, prefix, length, prompt_ids, own)
    while True:
        answer.append(int(logits[-1].argmax()))
        if len(answer) == new_tokens:
            return answer
        logits = logits_behind(model, prefix, length, answer[-1:], own)

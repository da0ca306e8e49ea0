"""The queries of traces, and what the prefix answered them.

prefix, once ──> exact KV            in one piece, or in chunks that do not see each other
every trace  ──> q, (o, lse) over the prefix, and the most attention that its tokens drew
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvtier.errors import UsageError
from kvtier.heads.model.config import shape_of
from kvtier.heads.profile import full_profile
from kvtier.heads.progress import Progress, each, no_progress
from kvtier.heads.reference.attention import AttentionState, Block, attend, attend_own, attending
from kvtier.heads.reference.rotation import rotation_of
from kvtier.heads.reference.session import ReferenceSession
from kvtier.memory.prefixes import Asked, LayerKV
from kvtier.memory.traces import Trace


class LayerQueries(NamedTuple):
    """The answers of the prefix to a layer's queries, T tokens of all traces; T = 0 in a layer
    whose queries nobody wants.

    q:    float32 `[T, kv_heads, group, dim]`, before rotation
    o:    float32 `[T, kv_heads, group, dim]` and lse `[T, kv_heads, group]`, over the prefix; zeros
          where nobody wants them
    drawn: float32 `[kv_heads, prefix tokens]`, the largest share of its attention that any query
          gave to each token
    own_o, own_lse: as o and lse, over the request's own tokens; None where nobody asked
    """

    q: Tensor
    o: Tensor
    lse: Tensor
    drawn: Tensor
    own_o: Tensor | None = None
    own_lse: Tensor | None = None


class Collected(NamedTuple):
    """behind: int64 `[T]`, how far behind the prefix's end each query stands."""

    layers: list[LayerQueries]
    behind: Tensor


def prefix_kv(
    model: Any, prefix_ids: Sequence[int], *, chunk_tokens: int | None = None
) -> list[LayerKV]:
    """The prefix's exact KV, layer by layer.

    chunk_tokens: the prefix is encoded in chunks of so many tokens that do not see each other, each
    at its own place. Such chunks could be computed side by side; what they answer is another
    matter. Raises UsageError for less than one token.
    """
    if chunk_tokens is not None and chunk_tokens < 1:
        raise UsageError("chunk_tokens", "at least one token", chunk_tokens)
    size = chunk_tokens or len(prefix_ids)
    parts = [
        _encoded(model, prefix_ids[begin : begin + size], begin)
        for begin in range(0, len(prefix_ids), size)
    ]
    if len(parts) == 1:
        return parts[0]
    return [
        (torch.cat([k for k, _ in layer], dim=1), torch.cat([v for _, v in layer], dim=1))
        for layer in zip(*parts, strict=True)
    ]


def _encoded(model: Any, ids: Sequence[int], first: int) -> list[LayerKV]:
    """The KV of tokens that see themselves alone, the first of them at position `first`."""
    shape = shape_of(model)
    session = ReferenceSession(model, full_profile(shape))
    session.num_tokens = first
    session.turn(ids, 0)
    return [session.exact_kv(layer) for layer in range(shape.num_layers)]


@torch.inference_mode()
def collect(
    model: Any,
    kv: Sequence[LayerKV],
    traces: Sequence[Trace],
    progress: Progress = no_progress,
    *,
    layers: Container[int] | None = None,
    with_states: bool = True,
    with_own: bool = False,
) -> Collected:
    """Read every trace behind the prefix whose KV this is, prompts and answers alike.

    A token takes a layer's 4 bytes per query head and dimension, and as much for each kind of
    state. layers: those whose queries are wanted, all by default. with_states: what they found in
    the prefix, with_own: in their own request.
    """
    length = kv[0][0].shape[1]
    parts: list[list[list[Tensor]]] = [[] for _ in kv]
    drawn = [torch.zeros(k.shape[:2]) for k, _ in kv]
    for trace in each(traces, "reading traces", progress):
        for layer, asked, own, found in _answers(model, kv, trace, length):
            if layers is None or layer in layers:
                states = [found] * with_states + [own] * with_own
                sides = [side for one in states for side in _by_token(one, asked.q.shape[1])]
                parts[layer].append([asked.unrotated.float(), *sides])
            most = _shares(kv[layer][0], asked, own, found).amax(1).cpu()
            drawn[layer] = torch.maximum(drawn[layer], most)
    shape = shape_of(model)
    no_query = torch.zeros(0, shape.num_kv_heads, shape.group_size, shape.head_dim)
    found_in = []
    for mine, by_token in zip(parts, drawn, strict=True):
        q, *sides = [torch.cat(side) for side in zip(*mine, strict=True)] or [no_query]
        if not mine or not with_states:
            nothing = q.new_zeros(()).expand_as(q)
            sides = [nothing, nothing[..., 0], *sides]
        found_in.append(LayerQueries(q, sides[0], sides[1], by_token, *sides[2:]))
    behind = [torch.arange(len(trace.ids)) for trace in traces]
    return Collected(found_in, torch.cat(behind))


def _by_token(state: AttentionState, group: int) -> tuple[Tensor, Tensor]:
    """A state's rows, float32 `[tokens, kv_heads, group, dim]` and `[tokens, kv_heads, group]`."""
    kv_heads, rows, dim = state.out.shape
    o = state.out.view(kv_heads, group, rows // group, dim).permute(2, 0, 1, 3)
    return o.float(), state.lse.view(kv_heads, group, -1).permute(2, 0, 1).float()


def _answers(
    model: Any, kv: Sequence[LayerKV], trace: Trace, length: int
) -> Iterator[tuple[int, Asked, AttentionState, AttentionState]]:
    """Layer by layer: what a trace's tokens ask, and what they find in themselves and in the
    prefix."""
    found: list[tuple[int, Asked, AttentionState, AttentionState]] = []

    def attend_layer(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        grouped = q[0].view(k.shape[1], -1, *q.shape[2:])
        positions = torch.arange(length, length + q.shape[2], device=q.device)
        asked = Asked(grouped, rotation_of(model, layer, positions), positions - length, scale)
        own = attend_own(grouped, k[0], v[0], scale)
        prefix = attend(grouped.flatten(1, 2), Block(*kv[layer]), scale)
        found.append((layer, asked, own, prefix))
        return own.merge(prefix).out.reshape(q.shape)

    ids = torch.tensor([list(trace.ids)], device=model.device)
    positions = torch.arange(length, length + len(trace.ids), device=model.device)[None]
    with attending(model, attend_layer):
        model(ids, position_ids=positions, use_cache=False, logits_to_keep=1)
    yield from found


def _shares(keys: Tensor, asked: Asked, own: AttentionState, found: AttentionState) -> Tensor:
    """Float32 `[kv_heads, group * tokens, prefix tokens]`: the part of each query's attention, over
    the prefix and its own request, that each token of the prefix draws."""
    logits = asked.q.flatten(1, 2).float() @ keys.float().transpose(1, 2) * asked.scale
    total = torch.logaddexp(own.lse.float(), found.lse.float())
    return torch.exp(logits - total.unsqueeze(-1))

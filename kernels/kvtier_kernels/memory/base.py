"""The kernel contract, fourth part: attention over fixed prefixes that memories stand for.

A memory of a prefix has M entries in every layer. Each is an attention state over the whole prefix,
under the key of the queries that it is for. It also has some of the prefix's own KV, `kept` for the
queries that no entry is for:

    query ──project──> x ──nearest key──> entry near enough? yes: its state  (KV heads that look up)
                                                             no:  attention over the kept KV
                                          other KV heads:         attention over the kept KV

Several memories lie behind one another in the same tensors; each token says which is its own, or
that it has none. The result is an `AttentionState`, to be merged with the rest of the context's.
The lookup is one of a token and layer, by all of its query heads together. Sources: Attention-State
Memory ("Context Memorization for Efficient Long Context Generation", 2026) for states under query
keys.

Ownership and threads: as in kvtier_kernels.base. On CUDA nothing waits for the device, so that
graphs can record it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from kvtier_kernels.states import AttentionState

# Numbers of a key that say where behind the prefix a query stands.
PLACE_WIDTH = 4
# Tokens behind a prefix in which the slow and the fast of them turn half around.
PLACE_SPANS = (8192, 128)


class MemoryLayer(NamedTuple):
    """One layer of N memories, of H KV heads with G query heads each; E entries and K kept KV
    entries in all.

    projection:    float32 [N, R, H, G, D], of queries before rotation
    keys:          float32 [E, R + PLACE_WIDTH], rows of length 1
    key_indptr:    [N + 1] int32, whose keys, `o` and `lse` are whose
    place_weight:  [N] float32, how much a query's place counts beside its direction
    nearness:      [N] float32, an entry answers at this cosine or more; above 1: none does
    prefix_tokens: [N] int32, how long the prefixes are
    o, lse:        [E, H, G, D] and float32 [E, H, G], the states
    looks_up:      [N, H] bool, which KV heads are answered by entries
    kept_k:        [K, D], rotated keys of the prefixes, and kept_v [K, D]
    kept_indptr:   [N * H + 1] int32: head h of memory m has the kept KV from kept_indptr[m * H + h]
    """

    projection: torch.Tensor
    keys: torch.Tensor
    key_indptr: torch.Tensor
    place_weight: torch.Tensor
    nearness: torch.Tensor
    prefix_tokens: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor
    looks_up: torch.Tensor
    kept_k: torch.Tensor
    kept_v: torch.Tensor
    kept_indptr: torch.Tensor


class MemoryAnswer(NamedTuple):
    """The answers of memories to queries.

    state:  over each token's prefix; empty (lse -inf) for tokens without a memory
    entry:  [tokens] int32, which entry answered; -1 where none was near enough or there is no
            memory
    cosine: [tokens] float32, of the nearest entry; -inf where there is none
    """

    state: AttentionState
    entry: torch.Tensor
    cosine: torch.Tensor


class MemoryKernels(ABC):
    """One backend of the contract in this module's docstring."""

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        x: torch.Tensor,
        positions: torch.Tensor,
        ids: torch.Tensor,
        layer: MemoryLayer,
        scale: float,
    ) -> MemoryAnswer:
        """Queries over the prefixes of their memories.

        q:         [tokens, H, G, D], rotated; scale multiplies q.k
        x:         float32 [tokens, N, R], of `project`
        positions: [tokens] int64, of the queries in their contexts
        ids:       [tokens] int32, each token's memory; -1: none
        """


def project(q: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """Return the projections of queries that every memory's lookup takes, float32 [tokens, N, R].

    q: [tokens, H, G, D] before rotation; projection: as in MemoryLayer. For some of the KV heads
    the result is a part: the parts of all heads add up.
    """
    return torch.einsum("thgd,nrhgd->tnr", q.float(), projection.float())


def lookup_keys(
    x: torch.Tensor, behind: torch.Tensor, place_weight: torch.Tensor | float
) -> torch.Tensor:
    """The keys of projected queries, float32 [tokens, R + PLACE_WIDTH] of length 1, so that a
    product of two is their cosine.

    x:            [tokens, R]
    behind:       [tokens], how far behind the prefix's end each stands
    place_weight: [tokens], or one for all
    """
    direction = torch.nn.functional.normalize(x.float(), dim=-1)
    weight = torch.as_tensor(place_weight, dtype=torch.float32, device=x.device)
    place = place_of(behind) * weight.unsqueeze(-1)
    length = torch.sqrt(1 + weight.square()).unsqueeze(-1)
    return torch.cat([direction, place], dim=-1) / length


def place_of(behind: torch.Tensor) -> torch.Tensor:
    """Float32 [tokens, PLACE_WIDTH] of length 1: where queries stand behind the prefix's end.

    The first pair turns half around over the longer of PLACE_SPANS and stays there, so it tells
    near from far; the second turns on and on, so it tells neighbours apart.
    """
    slow, fast = PLACE_SPANS
    share = (behind.float() / slow).clamp(0, 1) * torch.pi
    # Exact however far behind: what is whole turns is left out before it becomes a float.
    turns = behind.remainder(2 * fast).float() / fast * torch.pi
    return torch.stack([share.cos(), share.sin(), turns.cos(), turns.sin()], dim=-1) / 2**0.5

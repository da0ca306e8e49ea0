"""Others' decode attention over heads that hold different entries, beside ours on the same inputs.

    pip install --no-deps --target PEERS kvpress==0.5.5
    git clone https://github.com/vnchari/compactor-vllm PEERS/compactor-vllm
    git -C PEERS/compactor-vllm checkout 8bbac3a

Of each one file is read, which wants torch, Triton and transformers alone:

    compactor-vllm   each head's entries in pages of its own, found by a table per head: Triton
    kvpress          one dense cache; before every call, keys of entries that a head dropped are
                     overwritten by one that no query sees, and all of them are attended to

What is handed to them is built here out of our lists, so that outputs can be compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu.lists import Contexts
from benchmarks.gpu.llama import SINK_TOKENS

COMPACTOR_FILE = "compactor-vllm/src/compactor_vllm/attention/sparse_decode_kernel.py"
KVPRESS_FILE = "kvpress/attention_patch.py"
# Tokens of compactor-vllm's pages, as its engine has them by default.
PAGE_TOKENS = 128


def load_peer(peers: Path, file: str) -> ModuleType:
    """A file of a peer, without the package around it. Raises FileNotFoundError."""
    path = peers / file
    spec = spec_from_file_location(f"kvtier_peer_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Paged:
    """KV as compactor-vllm has it: k, v `[pages * PAGE_TOKENS, dim]`, lengths `[requests, heads]`,
    table `[requests, heads, pages of the longest]`."""

    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor


def to_pages(contexts: Contexts, layer: int, seed: int) -> Paged:
    """The lists of a layer; pages lie anywhere."""
    device, dim = contexts.kv.k.device, contexts.kv.k.shape[1]
    shape = contexts.requests, contexts.heads
    lengths = torch.tensor(contexts.packed) + contexts.dense.cpu()[:, None]
    pages = -(-lengths // PAGE_TOKENS)
    free = torch.randperm(int(pages.sum()), generator=torch.Generator().manual_seed(seed))
    table = torch.zeros(*shape, int(pages.max()), dtype=torch.int32)
    k, v = (contexts.kv.k.new_zeros(len(free) * PAGE_TOKENS, dim) for _ in "kv")
    taken = torch.split(free, pages.flatten().tolist())
    for (request, head), mine in zip(itertools.product(*map(range, shape)), taken, strict=True):
        table[request, head, : len(mine)] = mine
        keys, values = contexts.of(layer, request, head)
        rows = (mine[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()
        rows = rows[: len(keys)].to(device)
        k[rows], v[rows] = keys, values
    return Paged(k, v, lengths.int().to(device), table.to(device))


class CompactorVllm:
    """compactor-vllm's decode for contexts of these lengths."""

    def __init__(self, module: ModuleType, paged: Paged, multiprocessors: int) -> None:
        self._decode = module.head_sparse_decode_attention
        requests, heads = paged.lengths.shape
        self._requests = torch.arange(requests, dtype=torch.int32, device=paged.k.device)
        # Its engine decides so before a step: by the longest, as a power of two.
        longest = 1 << int(paged.lengths.max()).bit_length()
        self._splits = module.num_splits_heuristic(
            requests * heads, max_seq_len=longest, num_sms=multiprocessors, max_splits=12
        )

    def decode(self, q: torch.Tensor, paged: Paged, scale: float) -> torch.Tensor:
        """q `[requests, heads, group, dim]` -> the same shape."""
        out: torch.Tensor = self._decode(
            q.flatten(1, 2),
            paged.k,
            paged.v,
            paged.lengths,
            paged.table,
            self._requests,
            q.shape[1],
            PAGE_TOKENS,
            scale,
            key_split=self._splits,
        )
        return out.view(q.shape)


@dataclass(frozen=True)
class Masked:
    """KV as kvpress has it: k, v `[1, heads, tokens, dim]`, and which entries are not to be
    seen."""

    k: torch.Tensor
    v: torch.Tensor
    dropped: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def to_masked(contexts: Contexts, tokens: int) -> Masked:
    """The first layer of one context of so many tokens, of which a head that does not hold all
    keeps sinks and what is recent."""
    heads = contexts.heads
    k, v = (x.new_zeros(1, heads, tokens, x.shape[1]) for x in contexts.kv[:2])
    seen = torch.zeros(1, heads, tokens, dtype=torch.bool, device=k.device)
    for head in range(heads):
        keys, values = contexts.of(0, 0, head)
        sinks = min(SINK_TOKENS, len(keys))
        recent = torch.arange(tokens - len(keys) + sinks, tokens)
        places = torch.cat([torch.arange(sinks), recent]).to(k.device)
        k[0, head, places], v[0, head, places] = keys, values
        seen[0, head, places] = True
    batch, row, place = (~seen).nonzero(as_tuple=True)
    return Masked(k, v, (batch, row, place))


class Kvpress:
    """kvpress's attention for heads that dropped different entries, over torch's own."""

    def __init__(self, module: ModuleType) -> None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        self._attend: Callable[..., Any] = module.attention_patch(sdpa_attention_forward)

    def decode(self, q: torch.Tensor, masked: Masked, scale: float) -> torch.Tensor:
        """q `[1, heads, group, dim]` -> the same shape."""
        layer = SimpleNamespace(
            masked_key_indices=masked.dropped,
            num_key_value_groups=q.shape[2],
            is_causal=True,
            training=False,
        )
        query = q.flatten(1, 2).unsqueeze(2)
        out, _ = self._attend(layer, query, masked.k, masked.v, None, 0.0, scaling=scale)
        found: torch.Tensor = out.view(q.shape)
        return found

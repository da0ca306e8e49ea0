"""Others' decode attention over heads that hold different entries, beside ours on the same inputs.

    pip install --no-deps --target PEERS kvpress==0.5.5
    git clone https://github.com/vnchari/compactor-vllm PEERS/compactor-vllm
    git -C PEERS/compactor-vllm checkout 8bbac3a

Of each one file is read, which wants torch, Triton and transformers alone:

    compactor-vllm   each head's entries in pages of its own, found by a table per head: Triton
    kvpress          one dense cache; before every call, keys of entries that a head dropped are
                     overwritten by one that no query sees, and all of them are attended to

What is handed to them is built here out of our slots, so that outputs can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from benchmarks.common.llama import SINK_TOKENS
from kvtier_kernels import AttentionKernels, RaggedKV

COMPACTOR_FILE = "compactor-vllm/src/compactor_vllm/attention/sparse_decode_kernel.py"
KVPRESS_FILE = "kvpress/attention_patch.py"
# Tokens of compactor-vllm's pages, as its engine has them by default.
PAGE_TOKENS = 128


@dataclass(frozen=True)
class Held:
    """Heads that hold the same entries: `kv` by slot, and each request's slots between `indptr`."""

    kv: RaggedKV
    slots: torch.Tensor
    indptr: Sequence[int]

    @property
    def heads(self) -> int:
        return self.kv.k.shape[1]

    def of(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[heads, entries, dim]` of a request."""
        slots = self.slots[self.indptr[request] : self.indptr[request + 1]].long()
        return self.kv.k[slots].transpose(0, 1), self.kv.v[slots].transpose(0, 1)


def decode_classes(
    kernels: AttentionKernels,
    q: torch.Tensor,
    kv: Sequence[RaggedKV],
    plans: Sequence[Any],
    scale: float,
) -> torch.Tensor:
    """Ours: q and the outcome `[requests, heads, group, dim]`, heads of all classes in a row."""
    parts = torch.split(q, [one.k.shape[1] for one in kv], dim=1)
    outs = [
        kernels.decode(part, one, plan, scale).o
        for part, one, plan in zip(parts, kv, plans, strict=True)
    ]
    return torch.cat(outs, dim=1)


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
    """As compactor-vllm has it: k, v `[pages * PAGE_TOKENS, dim]`, lengths `[requests, heads]`,
    table `[requests, heads, pages of the longest]`."""

    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor


def to_pages(classes: Sequence[Held], seed: int) -> Paged:
    """Heads of all classes after each other; pages lie anywhere."""
    device, dtype, dim = classes[0].slots.device, classes[0].kv.k.dtype, classes[0].kv.k.shape[-1]
    requests = len(classes[0].indptr) - 1
    lengths = torch.tensor(
        [
            [one.indptr[at + 1] - one.indptr[at] for one in classes for _ in range(one.heads)]
            for at in range(requests)
        ],
        dtype=torch.int32,
    )
    pages = -(-lengths.long() // PAGE_TOKENS)
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(int(pages.sum()), generator=generator)
    table = torch.zeros(*lengths.shape, int(pages.max()), dtype=torch.int32)
    k, v = (
        torch.zeros(len(free) * PAGE_TOKENS, dim, dtype=dtype, device=device) for _ in ("k", "v")
    )
    taken = 0
    for request in range(requests):
        head = 0
        for one in classes:
            keys, values = one.of(request)
            for own_keys, own_values in zip(keys, values, strict=True):
                count = int(pages[request, head])
                mine = free[taken : taken + count]
                table[request, head, :count] = mine
                rows = (mine[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()
                rows = rows[: len(own_keys)].to(device)
                k[rows], v[rows] = own_keys, own_values
                taken += count
                head += 1
    return Paged(k, v, lengths.to(device), table.to(device))


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
    """As kvpress has it: k, v `[1, heads, tokens, dim]`, and which entries are not to be seen."""

    k: torch.Tensor
    v: torch.Tensor
    dropped: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def to_masked(classes: Sequence[Held], tokens: int) -> Masked:
    """One context of which a head that does not hold all keeps sinks and what is recent."""
    device, dim = classes[0].slots.device, classes[0].kv.k.shape[-1]
    heads = sum(one.heads for one in classes)
    k, v = (
        torch.zeros(1, heads, tokens, dim, dtype=classes[0].kv.k.dtype, device=device)
        for _ in ("k", "v")
    )
    seen = torch.zeros(1, heads, tokens, dtype=torch.bool, device=device)
    head = 0
    for one in classes:
        keys, values = one.of(0)
        held = keys.shape[1]
        sinks = min(SINK_TOKENS, held)
        recent = torch.arange(tokens - held + sinks, tokens)
        places = torch.cat([torch.arange(sinks), recent]).to(device)
        mine = slice(head, head + one.heads)
        k[0, mine, places], v[0, mine, places] = keys, values
        seen[0, mine, places] = True
        head += one.heads
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


__all__ = [
    "COMPACTOR_FILE",
    "KVPRESS_FILE",
    "CompactorVllm",
    "Held",
    "Kvpress",
    "Masked",
    "Paged",
    "decode_classes",
    "load_peer",
    "to_masked",
    "to_pages",
]

"""Others' kernels get what ours have: checked by stand-ins that do what theirs say they do."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.check.claims import make_bars
from benchmarks.gpu.check.peer_kernels import (
    COMPACTOR_FILE,
    KVPRESS_FILE,
    PAGE_TOKENS,
    CompactorVllm,
    Kvpress,
    load_peer,
    to_masked,
    to_pages,
)
from benchmarks.gpu.lists import Contexts, make_contexts
from kvtier_kernels import get_kernels

SCALE = 0.2
# compactor-vllm describes its arguments like this.
PAGED_DECODE = """
import torch
def num_splits_heuristic(total_mblocks, max_seq_len, num_sms, max_splits):
    return 1
def head_sparse_decode_attention(
    q, k, v, lengths, table, batch_mapping, heads, page, scale, key_split
):
    out = torch.zeros_like(q)
    group = q.shape[1] // heads
    for b in range(len(q)):
        for h in range(heads):
            at = torch.arange(int(lengths[b, h]))
            rows = table[batch_mapping[b], h][at // page].long() * page + at % page
            own = slice(h * group, (h + 1) * group)
            out[b, own] = (q[b, own] @ k[rows].T * scale).softmax(-1) @ v[rows]
    return out
"""
# kvpress's keys that no query sees amount to this.
MASKING = """
import torch
def attention_patch(func):
    def wrapper(module, query, key, value, attention_mask, dropout, **kwargs):
        seen = torch.ones(key.shape[:3], dtype=torch.bool)
        seen[module.masked_key_indices] = False
        mask = seen.repeat_interleave(module.num_key_value_groups, 1).unsqueeze(2)
        return func(module, query, key, value, mask, dropout, **kwargs)
    return wrapper
"""


@pytest.fixture
def peers(tmp_path: Path) -> Path:
    for file, text in ((COMPACTOR_FILE, PAGED_DECODE), (KVPRESS_FILE, MASKING)):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text)
    return tmp_path


def contexts_of(packed: list[list[int]], dense: list[int]) -> Contexts:
    return make_contexts(
        packed, dense, layers=2, dim=16, dtype=torch.float32, device="cpu", seed=3, run=32
    )


def by_reference(q: torch.Tensor, contexts: Contexts, layer: int) -> torch.Tensor:
    kernels = get_kernels("reference")
    return kernels.lists.decode(q, contexts.kv, contexts.planned_by(kernels), layer, SCALE).o


def test_pages_hold_each_heads_entries(peers: Path) -> None:
    longest = 3 * PAGE_TOKENS
    packed = [[longest, 5, longest - 40], [0, 1, 0], [PAGE_TOKENS, 77, 3], [130, 200, 130]]
    contexts = contexts_of(packed, [0, 1, 33, 0])
    paged = to_pages(contexts, 1, seed=1)
    q = torch.randn(4, 3, 2, 16)
    peer = CompactorVllm(load_peer(peers, COMPACTOR_FILE), paged, multiprocessors=4)
    torch.testing.assert_close(peer.decode(q, paged, SCALE), by_reference(q, contexts, 1))
    used = {
        int(page)
        for b, h in itertools.product(range(4), range(3))
        for page in paged.table[b, h, : -(-int(paged.lengths[b, h]) // PAGE_TOKENS)]
    }
    assert len(used) * PAGE_TOKENS == len(paged.k), "a page is shared, or no head's"


def test_a_dense_cache_masks_what_its_heads_dropped(peers: Path) -> None:
    contexts = contexts_of([[270, 10, 10, 10]], [30])
    dense = to_masked(contexts, 300)
    q = torch.randn(1, 4, 2, 16)
    peer = Kvpress(load_peer(peers, KVPRESS_FILE))
    torch.testing.assert_close(peer.decode(q, dense, SCALE), by_reference(q, contexts, 0))
    assert len(dense.dropped[0]) == 3 * 260


def test_peers_are_bars_and_one_that_did_not_run_is_not_met():
    row = {"shape": "batch 1", "difference": 1e-3, "ours_s": 2.0, "theirs_s": 1.0}
    document = {
        "peers": {"compactor_vllm": [row], "missing": {"kvpress": "FileNotFoundError: x"}},
        "failures": {},
    }
    assert {bar.name: bar.met for bar in make_bars(document)} == {
        "batch 1: compactor-vllm's kernel, largest difference": True,
        "batch 1: compactor-vllm's kernel, our time / its": False,
        "kvpress did not run: FileNotFoundError: x": False,
    }
